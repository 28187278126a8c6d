#!/usr/bin/env python3
"""Side-by-side benchmark.  Core 0: load generator and mocks.  Core 1: the target under test.
  bench.py overhead --rounds 3 --out results/overhead.jsonl [--only a,b]   a, b, c: small and long requests, streams
  bench.py routing  --seeds 1,2,3 --out results/routing.jsonl [--only a,b] d: hit rate and first tokens on simulated caches
  bench.py scale    --rounds 3 --out results/scale.jsonl                   N processes on one port
See docs/bench.md.
All targets are started once and stay up; each round visits every scenario and target, so noise hits all alike."""
import argparse, http.client, json, os, re, signal, subprocess, sys, time
import psutil
import targets as T
HERE = T.HERE
PROCS = []
WAIT = 3.0

def spawn(cmd, env, core, log):
    e = dict(os.environ, **env)
    f = open(f"{T.RUN}/{log}.log", "w")
    p = subprocess.Popen((["taskset", "-c", str(core)] if core is not None else []) + cmd, env=e, stdout=f, stderr=f, cwd=T.RUN)
    PROCS.append(p); return p

def wait_ready(port, body, path="/v1/chat/completions", t=90):
    end = time.time() + t; n = 0; err = None
    while time.time() < end:
        try:
            h = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            h.request("POST", path, body, {"content-type": "application/json", "authorization": "Bearer " + T.KEY})
            r = h.getresponse(); r.read(); h.close()
            if r.status != 200: raise OSError(r.status)
            n += 1
            if n >= 4: return True
        except Exception as e: err = e; n = 0; time.sleep(.5)
    print("not ready", port, err, file=sys.stderr); return False

def tree(pid):
    try: p = psutil.Process(pid); return [p] + p.children(recursive=True)
    except psutil.NoSuchProcess: return []
def cpu(pids):
    s = 0.0
    for pid in pids:
        for p in tree(pid):
            try: t = p.cpu_times(); s += t.user + t.system
            except psutil.NoSuchProcess: pass
    return s
def rss(pid): return sum(p.memory_info().rss for p in tree(pid)) / 1e6
def busy():
    c = psutil.cpu_times(); return c.user + c.nice + c.system + c.irq + c.softirq + c.steal

def quiet(limit=0.25, wait=6.0):
    """wait (bounded) until the rest of the machine uses less than `limit` cores"""
    end = time.time() + wait
    while True:
        b = busy(); time.sleep(.12); v = (busy() - b) / .12
        if v < limit or time.time() > end: return v

def measure(fn, pid, mocks):
    quiet(wait=WAIT)
    b0, c0, m0, s0 = busy(), cpu([pid]) if pid else 0, cpu(mocks), psutil.Process().cpu_times()
    t0 = time.time(); r = fn(); dt = time.time() - t0
    b1, c1, m1, s1 = busy(), cpu([pid]) if pid else 0, cpu(mocks), psutil.Process().cpu_times()
    lg = s1.children_user + s1.children_system + s1.user + s1.system - s0.children_user - s0.children_system - s0.user - s0.system
    r.update(cpu_s=c1 - c0, wall=dt, other_cores=round(max(0, (b1 - b0 - (c1 - c0) - (m1 - m0) - lg)) / dt, 3))
    if pid: r["rss_mb"] = rss(pid)
    return r

WRK_LUA = """
local n = tonumber(os.getenv("BODY_BYTES")) or 100
local bodies = {}
local words = {"alpha","bravo","river","stone","cloud","green","query","table","model","token","cache","route"}
math.randomseed(7)
for i = 1, (n > 4096 and 64 or 256) do
  local t, len = {}, 0
  while len < n do local w = words[math.random(#words)] .. string.format("%x", math.random(0, 65535)); t[#t+1] = w; len = len + #w + 1 end
  local s = table.concat(t, " "):sub(1, n)
  bodies[i] = wrk.format("POST", "/v1/chat/completions", {["host"]="127.0.0.1", ["content-type"]="application/json", ["authorization"]="Bearer " .. os.getenv("BENCH_KEY")},
    '{"model":"mock-model","messages":[{"role":"user","content":"' .. s .. '"}],"max_tokens":12,"temperature":0,"stream":false}')
end
local k = 0
init = function(args) for i, b in ipairs(bodies) do end end
request = function() k = k % #bodies + 1; return bodies[k] end
done = function(s, l, r)
  io.write(string.format("JSON{\\"n\\":%d,\\"seconds\\":%f,\\"p50_ms\\":%f,\\"p90_ms\\":%f,\\"p99_ms\\":%f,\\"errors\\":%d}\\n",
    s.requests, s.duration/1e6, l:percentile(50)/1e3, l:percentile(90)/1e3, l:percentile(99)/1e3, s.errors.connect+s.errors.read+s.errors.write+s.errors.status+s.errors.timeout))
end
"""
def wrk(port, conc, secs, nbytes, core=0):
    lua = T._write("wrk.lua", WRK_LUA)
    o = subprocess.run((["taskset", "-c", str(core)] if core is not None else []) + ["wrk", "-t1", f"-c{conc}", f"-d{secs}s", "--latency", "--timeout", "20s", "-s", lua, f"http://127.0.0.1:{port}"],
                       env=dict(os.environ, BODY_BYTES=str(nbytes)), capture_output=True, text=True, timeout=secs + 60)
    m = re.search(r"JSON(\{.*\})", o.stdout)
    if not m: return dict(n=0, errors=1, seconds=secs, rps=0, out=o.stdout[-300:] + o.stderr[-300:])
    r = json.loads(m.group(1)); r["rps"] = r["n"] / r["seconds"]; return r
def lg(mode, port, *args):
    o = subprocess.run(["taskset", "-c", "0", T.PY, f"{HERE}/loadgen.py", mode, "--port", str(port), *map(str, args)], capture_output=True, text=True, timeout=300)
    try: return json.loads(o.stdout)
    except ValueError: return dict(n=0, errors=1, out=o.stderr[-500:])

def emit(f, r):
    f.write(json.dumps(r) + "\n"); f.flush()

def overhead(a):
    fast, paced, sat = [9101, 9102], [9111, 9112], [9121, 9122]
    U = lambda ps: [f"http://127.0.0.1:{p}" for p in ps]
    mk = spawn(*T.nginx_mock(fast), 0, "mock-nginx"), \
         spawn([T.PY, f"{HERE}/mock_worker.py", "--ports", "9111,9112", "--fast", "--chunk-interval-ms", "20"], {}, 0, "mock-paced"), \
         spawn([T.PY, f"{HERE}/mock_worker.py", "--ports", "9121,9122", "--fast"], {}, 0, "mock-sat")
    mocks = [p.pid for p in mk]; time.sleep(1)
    names = [n for n in T.TARGETS if not a.only or n in a.only.split(",")]
    up = {}
    b = b'{"model":"mock-model","messages":[{"role":"user","content":"hi"}],"max_tokens":5}'
    port = 9400
    for n in names:                       # three instances each: one per mock flavour
        up[n] = {}
        for kind, ps in (("fast", fast), ("paced", paced), ("sat", sat)):
            port += 1; cmd, env = T.TARGETS[n](port, U(ps))
            up[n][kind] = (spawn(cmd, env, 1, f"{n}-{kind}"), port)
    ok = []
    for n in names:
        if all(wait_ready(up[n][k][1], b) for k in up[n]): ok.append(n)
    print("ready:", ok, flush=True)
    f = open(a.out, "a")
    S = a.secs
    scen = []
    for c in (1, 16, 64): scen.append((f"small-c{c}", "fast", lambda p, c=c: wrk(p, c, S, 100)))
    for kb, cs in ((32, (1, 16)), (128, (1,))):
        for c in cs: scen.append((f"{kb}k-c{c}", "fast", lambda p, c=c, kb=kb: wrk(p, c, S, kb * 1024)))
    scen.append(("stream-paced", "paced", lambda p: lg("stream", p, "--concurrency", 64, "--seconds", 1)))
    scen.append(("stream-sat", "sat", lambda p: lg("stream", p, "--concurrency", 64, "--seconds", S)))
    if a.scen: scen = [s for s in scen if s[0] in a.scen.split(",")]
    direct = dict(fast=9101, paced=9111, sat=9121)
    for rnd in range(a.rounds):
        for sn, kind, fn in scen:
            for n in ["direct"] + ok:
                pid, p = (None, direct[kind]) if n == "direct" else (up[n][kind][0].pid, up[n][kind][1])
                r = measure(lambda: fn(p), pid, mocks)
                r.update(scenario=sn, target=n, round=rnd); emit(f, r)
                print(f"{rnd} {sn:13s} {n:28s} n={r['n']:7d} err={r.get('errors')} p50={r.get('p50_ms', 0):8.3f} p99={r.get('p99_ms', 0):8.3f} cpu_us/req={r['cpu_s'] / max(1, r['n']) * 1e6:8.1f} other={r['other_cores']}", flush=True)

def routing(a):
    names = [n for n in T.ROUTING if not a.only or n in a.only.split(",")]
    f = open(a.out, "a"); port = 9600; wport = 9700
    batches = [names[i:i + a.parallel] for i in range(0, len(names), a.parallel)]
    b = b'{"model":"mock-model","messages":[{"role":"user","content":"hi"}],"max_tokens":2}'
    for zipf in [float(z) for z in a.zipf.split(",")]:
      for seed in [int(s) for s in a.seeds.split(",")]:
        for bt in batches:
            live = []
            for n in bt:
                ps = [wport + i for i in range(4)]; wport += 4; port += 1
                m = spawn([T.PY, f"{HERE}/mock_worker.py", "--ports", ",".join(map(str, ps)), "--cache-blocks", str(a.cache_blocks), "--prefill-us", str(a.prefill_us), "--decode-us", "1000", "--tokens-per-chunk", "10"], {}, None, f"rm-{n}")
                live.append([n, port, ps, m])
            time.sleep(1)
            for l in live:
                cmd, env = T.ROUTING[l[0]](l[1], [f"http://127.0.0.1:{p}" for p in l[2]]); l.append(spawn(cmd, env, None, f"r-{l[0]}"))
            live = [l for l in live if wait_ready(l[1], b)]
            time.sleep(1); c0 = {l[0]: cpu([l[4].pid]) for l in live}
            ps = [(l, subprocess.Popen([T.PY, f"{HERE}/loadgen.py", "routing", "--port", str(l[1]), "--seed", str(seed), "--zipf", str(zipf), "--worker-ports", ",".join(map(str, l[2])), "--seconds", "240", "--conv-rate", str(a.conv_rate)]
                   + (["--session-header"] if a.session_header else []), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) for l in live]
            for l, p in ps:
                o, e = p.communicate(timeout=300)
                try: r = json.loads(o)
                except ValueError: r = dict(errors=-1, out=e[-400:])
                r.update(target=l[0], seed=seed, zipf=zipf, cpu_s=cpu([l[4].pid]) - c0[l[0]], cache_blocks=a.cache_blocks, prefill_us=a.prefill_us, conv_rate=a.conv_rate, session_header=a.session_header); emit(f, r)
                print(zipf, seed, {k: (round(v, 3) if isinstance(v, float) else v) for k, v in r.items() if k in ("target", "n", "errors", "hit_rate", "ttft_p50_ms", "ttft_p99_ms", "max_over_mean_req", "max_over_mean_prefill", "out")}, flush=True)
            for l in live: stop(l[4]); stop(l[3])

SCALE = {"nginx x1": ("nginx-rr", 1), "nginx x2 workers": (lambda p, u: T.nginx_proxy(p, u, workers=2), 1), "sglang-cache (tokio, 2 threads)": ("sglang-cache", 1), "vllm-cache (tokio, 2 threads)": ("vllm-cache", 1),
         "py-aiohttp x1": ("py-aiohttp", 1), "py-aiohttp x2": ("py-aiohttp", 2), "py-full-Server+rawclient x1": ("py-full-Server+rawclient", 1), "py-full-Server+rawclient x2": ("py-full-Server+rawclient", 2),
         "py-full-raw x1": ("py-full-raw", 1), "py-full-raw x2": ("py-full-raw", 2)}
def scale(a):
    """x N processes on one port (SO_REUSEPORT), nothing pinned: wrk, the mock and the target share both cores."""
    mk = spawn(*T.nginx_mock([9101, 9102]), None, "mock-nginx"); time.sleep(1)
    u = ["http://127.0.0.1:9101", "http://127.0.0.1:9102"]; f = open(a.out, "a"); port = 9900; up = {}
    b = b'{"model":"mock-model","messages":[{"role":"user","content":"hi"}],"max_tokens":5}'
    for n, (t, k) in SCALE.items():
        port += 1; fn = t if callable(t) else T.TARGETS[t]
        up[n] = ([spawn(*fn(port, u), None, f"scale-{port}-{i}") for i in range(k)], port)
    time.sleep(3); up = {n: v for n, v in up.items() if wait_ready(v[1], b)}
    for rnd in range(a.rounds):
        for c, nb in ((64, 100), (64, 8192)):
            for n, (ps, p) in up.items():
                quiet(wait=WAIT); pids = [x.pid for x in ps]
                c0, m0, b0, s0 = cpu(pids), cpu([mk.pid]), busy(), psutil.Process().cpu_times(); t0 = time.time()
                r = wrk(p, c, a.secs, nb, core=None); dt = time.time() - t0
                c1, m1, b1, s1 = cpu(pids), cpu([mk.pid]), busy(), psutil.Process().cpu_times()
                lgc = s1.children_user + s1.children_system - s0.children_user - s0.children_system
                r.update(scenario=f"scale-c{c}-{nb}B", target=n, round=rnd, cpu_s=c1 - c0, cores_used=(c1 - c0) / dt, other_cores=round(max(0, b1 - b0 - (c1 - c0) - (m1 - m0) - lgc) / dt, 3)); emit(f, r)
                print(f"{rnd} {r['scenario']} {n:32s} rps={r['rps']:8.0f} p50={r.get('p50_ms', 0):7.2f} p99={r.get('p99_ms', 0):7.2f} cpu_us/req={r['cpu_s'] / max(1, r['n']) * 1e6:7.1f} cores={r['cores_used']:.2f} other={r['other_cores']} err={r['errors']}", flush=True)

def stop(p):
    for q in reversed(tree(p.pid)):
        try: q.terminate()
        except psutil.NoSuchProcess: pass
    try: p.wait(5)
    except subprocess.TimeoutExpired:
        for q in reversed(tree(p.pid)):
            try: q.kill()
            except psutil.NoSuchProcess: pass
        p.wait(5)

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("mode", choices=["overhead", "routing", "scale"])
    ap.add_argument("--rounds", type=int, default=3); ap.add_argument("--secs", type=int, default=2)
    ap.add_argument("--only", default=""); ap.add_argument("--scen", default=""); ap.add_argument("--out", required=True)
    ap.add_argument("--seeds", default="1"); ap.add_argument("--zipf", default="0,1.2"); ap.add_argument("--parallel", type=int, default=9)
    ap.add_argument("--cache-blocks", type=int, default=1200); ap.add_argument("--prefill-us", type=float, default=150); ap.add_argument("--conv-rate", type=float, default=4.0)
    ap.add_argument("--session-header", action="store_true"); ap.add_argument("--wait-quiet", type=float, default=3.0)
    a = ap.parse_args(); os.makedirs(os.path.dirname(a.out) or ".", exist_ok=True); WAIT = a.wait_quiet
    signal.signal(signal.SIGTERM, lambda *x: sys.exit(1))
    try: {"overhead": overhead, "routing": routing, "scale": scale}[a.mode](a)
    finally:
        for p in PROCS:
            if p.poll() is None: stop(p)
