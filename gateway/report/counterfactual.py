"""The same requests under round-robin, as each record says of the worker whose turn it was."""

from __future__ import annotations

from gateway.report.model import Counterfactual
from gateway.report.query import Query
from gateway.report.savings import RATES_SQL

HOW = (
    "at each decision the gateway also recorded the worker that taking turns would have chosen: "
    "what it held of the prompt, and when the same cost model expected it to answer. Caches and "
    "queues are taken as they were: with round-robin all the time, popular prefixes would lie on "
    "every worker (more hits), and long-tailed ones would push each other out (fewer)"
)


def round_robin(query: Query) -> Counterfactual:
    """Final attempts that a worker answered and that carry the other choice."""
    ((requests, matched, other, ttft, other_ttft),) = query.rows("""
        SELECT count(*), coalesce(sum(t_captured), 0), coalesce(sum(rr_matched), 0),
               avg(predicted_s), avg(rr_ttft_s)
        FROM finals WHERE rr_matched IS NOT NULL AND t_prompt > 0
    """)
    ((saved,),) = query.rows(f"""
        {RATES_SQL}
        SELECT sum((t_captured - rr_matched) * rate)
        FROM finals JOIN rates ON rates.model = finals.model
        WHERE rr_matched IS NOT NULL AND t_prompt > 0
    """)
    return Counterfactual(
        policy="round_robin",
        requests=requests,
        matched=int(matched),
        other_matched=int(other),
        ttft_mean_s=ttft,
        other_ttft_mean_s=other_ttft,
        saved_prefill_s=saved,
        how=HOW,
    )
