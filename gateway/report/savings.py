"""What reuse saved, estimated from nothing but the ledger's own cold requests."""

from __future__ import annotations

from gateway.report.model import ModelRate, Number, Saved, Section
from gateway.report.query import Query

SLOPE_REQUESTS = 8
"""With fewer cold requests a fitted line says little."""

HOW = (
    "seconds per cold prompt token, per model, from answered requests that reused nothing: the "
    "median of TTFT / prompt tokens, or the slope of TTFT over prompt tokens where at least "
    f"{SLOPE_REQUESTS} such requests give a smaller positive one; times the delivered tokens"
)

RATES_SQL = f"""
    WITH cold AS (
        SELECT model, count(*) AS cold_requests, median(ttft_s / t_prompt) AS ratio,
               CASE WHEN count(*) >= {SLOPE_REQUESTS} AND stddev_pop(t_prompt) > 0
                    THEN regr_slope(ttft_s, t_prompt) END AS slope
        FROM finals
        WHERE outcome = 'ok' AND depth = 'none' AND ttft_s > 0
        GROUP BY model),
    rates AS (
        SELECT model, cold_requests,
               CASE WHEN slope > 0 AND slope < ratio THEN slope ELSE ratio END AS rate,
               CASE WHEN slope > 0 AND slope < ratio THEN 'slope' ELSE 'median' END AS method
        FROM cold)
"""


def savings(query: Query, total: Section) -> Saved:
    """Tokens, seconds and latency that reuse saved."""
    models = [
        ModelRate(
            model=model,
            cold_requests=cold or 0,
            s_per_token=rate,
            method=method or "none",
            tokens=int(tokens),
            prefill_s=None if rate is None else tokens * rate,
        )
        for model, cold, rate, method, tokens in query.rows(f"""
            {RATES_SQL}
            SELECT finals.model, any_value(cold_requests), any_value(rate), any_value(method),
                   sum(t_delivered) AS tokens
            FROM finals LEFT JOIN rates ON rates.model = finals.model
            GROUP BY finals.model HAVING sum(t_prompt) > 0 ORDER BY tokens DESC, finals.model
        """)
    ]
    known = [model.prefill_s for model in models if model.prefill_s is not None]
    return Saved(
        tokens=total.totals["delivered"],
        prefill_s=sum(known) if known else None,
        ttft_reduction_percent={**_measured(query, total), "per_request": _per_request(query)},
        how=HOW,
        models=models,
    )


def _measured(query: Query, total: Section) -> dict[str, Number]:
    ((hit,),) = query.rows("SELECT avg(ttft_s) FROM finals WHERE depth IN ('partial', 'full')")
    none = total.ttft_s["none"].mean
    return {
        "hit_vs_none": _reduction(hit, none),
        "full_vs_none": _reduction(total.ttft_s["full"].mean, none),
    }


def _reduction(warm: Number, cold: Number) -> Number:
    return None if warm is None or not cold else 100 * (1 - warm / cold)


def _per_request(query: Query) -> Number:
    ((mean,),) = query.rows(f"""
        {RATES_SQL}
        SELECT avg(100 * t_delivered * rate / (ttft_s + t_delivered * rate))
        FROM finals JOIN rates ON rates.model = finals.model
        WHERE depth IN ('partial', 'full') AND ttft_s > 0
    """)
    return None if mean is None else float(mean)
