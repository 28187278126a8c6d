#!/usr/bin/env python3
"""Markdown tables from results/*.jsonl: medians over rounds, spread = (min-max)."""
import collections, json, statistics as st, sys
def load(p): return [json.loads(l) for l in open(p)]
def md(v): return st.median(v) if v else float("nan")
def sp(v, f="%.0f"): return (f"{f} ({f}–{f})" % (md(v), min(v), max(v))) if v else "–"
def overhead(rows):
    d = collections.defaultdict(list)
    for r in rows:
        if r["n"] and (r.get("errors") or 0) <= r["n"] * .01: d[r["scenario"], r["target"]].append(r)
        elif r.get("errors"): d["ERR", r["target"]].append(r)
    tg = list(dict.fromkeys(r["target"] for r in rows)); sc = list(dict.fromkeys(r["scenario"] for r in rows))
    us = lambda r: r["cpu_s"] / r["n"] * 1e6
    base = "sglang-rr"
    print("### CPU µs a request (router process tree), median (min–max); small bodies c=1/16/64, long bodies\n")
    s2 = [s for s in sc if not s.startswith("stream")]
    print("| target | " + " | ".join(s2) + " | ratio to sglang-rr (small-c16) |\n|---" * 1 + "|---" * (len(s2) + 1) + "|")
    for t in tg:
        if t == "direct": continue
        b = md([us(r) for r in d["small-c16", base]])
        print(f"| {t} | " + " | ".join(sp([us(r) for r in d[s, t]]) for s in s2) + f" | {md([us(r) for r in d['small-c16', t]]) / b:.2f} |")
    print("\n### Added latency over direct, ms: p50 / p99 (medians over rounds; noise of other jobs included)\n")
    print("| target | " + " | ".join(s2) + " |\n|---" + "|---" * len(s2) + "|")
    for t in tg:
        if t == "direct": print("| direct (absolute) | " + " | ".join(f"{md([r['p50_ms'] for r in d[s, t]]):.3f} / {md([r['p99_ms'] for r in d[s, t]]):.2f}" for s in s2) + " |"); continue
        print(f"| {t} | " + " | ".join(f"{md([r['p50_ms'] for r in d[s, t]]) - md([r['p50_ms'] for r in d[s, 'direct']]):+.3f} / {md([r['p99_ms'] for r in d[s, t]]) - md([r['p99_ms'] for r in d[s, 'direct']]):+.2f}" for s in s2) + " |")
    print("\n### Lowest p50 of any round, ms (the least disturbed run)\n")
    print("| target | " + " | ".join(s2) + " |\n|---" + "|---" * len(s2) + "|")
    for t in tg: print(f"| {t} | " + " | ".join(f"{min([r['p50_ms'] for r in d[s, t]], default=float('nan')):.3f}" for s in s2) + " |")
    print("\n### Throughput, req/s: measured max of rounds / what one whole core would give (1 / CPU s a request)\n")
    s3 = [s for s in s2 if s != "small-c1"]
    print("| target | " + " | ".join(s3) + " |\n|---" + "|---" * len(s3) + "|")
    for t in tg:
        print(f"| {t} | " + " | ".join(f"{max([r['rps'] for r in d[s, t]], default=0):.0f} / " + (f"{1e6 / md([us(r) for r in d[s, t]]):.0f}" if t != "direct" and d[s, t] else "–") for s in s3) + " |")
    print("\n### Streaming: 64 streams x 100 chunks\n")
    print("| target | paced: CPU µs a chunk | ratio | CPU s / 1000 chunks | CPU s / 1000 streams | reads a chunk | TTFT p50 / p99 ms | saturated: chunks/s (max) | CPU µs a chunk | RSS MB |\n|---|---|---|---|---|---|---|---|---|---|")
    uc = lambda r: r["cpu_s"] / max(1, r["chunks"]) * 1e6
    b = md([uc(r) for r in d["stream-paced", base]])
    for t in tg:
        p, s = d["stream-paced", t], d["stream-sat", t]
        if not p: continue
        print(f"| {t} | {sp([uc(r) for r in p], '%.1f')} | {md([uc(r) for r in p]) / b:.2f} | {md([uc(r) for r in p]) / 1e3:.4f} | {md([r['cpu_s'] / r['n'] for r in p]) * 1e3:.2f} | {md([r['recvs_per_chunk'] for r in p]):.2f} | {md([r['ttft_p50_ms'] for r in p]):.1f} / {md([r['ttft_p99_ms'] for r in p]):.1f} | {max([r['chunks_per_s'] for r in s], default=0):.0f} | {sp([uc(r) for r in s], '%.1f')} | {md([r.get('rss_mb', 0) for r in p]):.0f} |")
    print("\nother cores busy during runs (median over all):", round(md([r["other_cores"] for r in rows]), 2), "min", min(r["other_cores"] for r in rows), "max", max(r["other_cores"] for r in rows))
    ratios(rows)
    e = {t: len(v) for (s, t), v in d.items() if s == "ERR"}
    if e: print("runs dropped for errors:", e)
def ratios(rows):
    """CPU a request (a chunk) of ours over a peer's: the median of the rounds' own ratios."""
    cost = {}
    for r in rows:
        n = r.get("chunks") if r["scenario"].startswith("stream") else r["n"]
        if n and r["target"] != "direct": cost[r["scenario"], r["target"], r["round"]] = r["cpu_s"] / n
    names = list(dict.fromkeys(r["target"] for r in rows)); scen = list(dict.fromkeys(r["scenario"] for r in rows))
    for own in ("ours", "before"):
        peers = [t for t in names if t not in ("direct", own)]
        if own not in names: continue
        print(f"\n### {own} over a peer, CPU a request or chunk, median of the rounds' ratios (min–max)\n")
        print("| scenario | " + " | ".join(peers) + " |\n|---" + "|---" * len(peers) + "|")
        for s in scen:
            def of(t): return [v / cost[s, t, k] for (a, b, k), v in cost.items() if (a, b) == (s, own) and cost.get((s, t, k))]
            print(f"| {s} | " + " | ".join(sp(of(t), "%.2f") for t in peers) + " |")
def routing(rows):
    d = collections.defaultdict(list)
    for r in rows:
        if "hit_rate" in r: d[r["zipf"], r["target"]].append(r)
    tg = list(dict.fromkeys(r["target"] for r in rows))
    for z in sorted({r["zipf"] for r in rows}):
        inf = md([r["hit_rate"] for r in d[z, "oracle:infinite"]])
        print(f"\n### Routing, {'uniform groups' if z == 0 else 'Zipf %s groups' % z} (4 workers; median over seeds (min–max))\n")
        print("| target | hit rate | of oracle | TTFT mean ms | p50 | p90 | p99 | max/mean requests | max/mean prefill time | CPU ms a request | errors |\n|---|---|---|---|---|---|---|---|---|---|---|")
        for t in sorted((t for t in tg if d[z, t]), key=lambda t: md([r["ttft_mean_ms"] for r in d[z, t]])):
            v = d[z, t]; c = [r["cpu_s"] / r["n"] * 1e3 for r in v if "cpu_s" in r]
            print(f"| {t} | {sp([r['hit_rate'] for r in v], '%.3f')} | {md([r['hit_rate'] for r in v]) / inf:.3f} | {sp([r['ttft_mean_ms'] for r in v])} | {md([r['ttft_p50_ms'] for r in v]):.0f} | {md([r['ttft_p90_ms'] for r in v]):.0f} | {sp([r['ttft_p99_ms'] for r in v])} | {md([r['max_over_mean_req'] for r in v]):.2f} | {md([r['max_over_mean_prefill'] for r in v]):.2f} | {('%.2f' % md(c)) if c else '–'} | {sum(r.get('errors', 0) for r in v)} |")
if __name__ == "__main__":
    for p in sys.argv[1:]:
        rows = load(p); (routing if "zipf" in rows[0] else overhead)(rows)
