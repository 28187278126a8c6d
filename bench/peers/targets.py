"""How to start each target.  start(name, port, urls) -> (cmd, env).  Ours is the first entry.
VENVS: where the peers' venvs are (BENCH_VENVS, default: where scripts/peers.sh makes them); RUN: scratch folder for configs and logs."""
import os, shutil, sys
HERE = os.path.dirname(os.path.abspath(__file__))
V = os.environ.get("BENCH_VENVS", os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "headwater", "peers"))   # scripts/peers.sh
RUN = os.environ.get("BENCH_RUN", f"{V}/run")
PY = f"{V}/base/bin/python"
G = f"{HERE}/gateways"
os.makedirs(RUN, exist_ok=True)
def _key():
    """A throw-away key for our own local LiteLLM (it refuses to start without one)."""
    import secrets
    p = f"{RUN}/bench-key"
    if not os.path.exists(p): open(p, "w").write("sk-bench-" + secrets.token_hex(24))
    return open(p).read()
KEY = os.environ["BENCH_KEY"] = _key()
ROOT = os.path.dirname(os.path.dirname(HERE))
OURS = os.environ.get("BENCH_PYTHON", f"{ROOT}/.venv/bin/python")   # an environment that Headwater can run in
BEFORE = os.environ.get("BENCH_BEFORE", "")                        # another checkout: the target "before"

def _write(name, s):
    p = f"{RUN}/{name}"; open(p, "w").write(s); return p

def nginx_proxy(port, urls, workers=1, policy=""):
    servers = "\n".join("server %s;" % u.split("//")[1] for u in urls)
    d = f"{RUN}/nginx-{port}"; os.makedirs(d, exist_ok=True)
    c = _write(f"nginx-{port}.conf", f"""
daemon off; master_process {'on' if workers > 1 else 'off'}; worker_processes {workers}; pid {d}/pid; error_log {d}/err warn;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 100000000; client_max_body_size 64m; client_body_buffer_size 1m;
 client_body_temp_path {d}/b; proxy_temp_path {d}/p; fastcgi_temp_path {d}/f; uwsgi_temp_path {d}/u; scgi_temp_path {d}/s;
 upstream w {{ {policy} {servers} keepalive 512; keepalive_requests 100000000; }}
 server {{ listen 127.0.0.1:{port} backlog=4096 {'reuseport' if workers > 1 else ''}; location / {{ proxy_pass http://w; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 600s; }} }}
}}""")
    return ["nginx", "-c", c, "-e", f"{d}/err"], {}

def nginx_mock(ports):
    import mock_worker as m
    body = m.fast_json().decode()
    d = f"{RUN}/nginx-mock"; os.makedirs(d, exist_ok=True)
    listens = " ".join(f"listen 127.0.0.1:{p} backlog=4096;" for p in ports)
    c = _write("nginx-mock.conf", f"""
daemon off; master_process off; worker_processes 1; pid {d}/pid; error_log {d}/err warn;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 100000000; client_max_body_size 64m; client_body_buffer_size 1m; default_type application/json;
 client_body_temp_path {d}/b; proxy_temp_path {d}/p; fastcgi_temp_path {d}/f; uwsgi_temp_path {d}/u; scgi_temp_path {d}/s;
 server {{ {listens}
  location = /v1/models {{ return 200 '{{"object":"list","data":[{{"id":"mock-model","object":"model","created":1700000000,"owned_by":"vllm"}}]}}'; }}
  location = /get_model_info {{ return 200 '{{"model_path":"mock-model","tokenizer_path":"/nonexistent","is_generation":true}}'; }}
  location = /model_info {{ return 200 '{{"model_path":"mock-model","tokenizer_path":"/nonexistent","is_generation":true}}'; }}
  location = /get_server_info {{ return 200 '{{"model_path":"mock-model","served_model_name":"mock-model","dp_size":1,"tp_size":1}}'; }}
  location = /server_info {{ return 200 '{{"model_path":"mock-model","served_model_name":"mock-model","dp_size":1,"tp_size":1}}'; }}
  location /v1/ {{ return 200 '{body}'; }}
  location / {{ return 200 '{{}}'; }}
 }} }}""")
    return ["nginx", "-c", c, "-e", f"{d}/err"], {}

def sgl(port, urls, policy, extra=()):
    return [f"{V}/sgl/bin/python", "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", policy,
            "--prometheus-port", str(port + 10000), "--prometheus-host", "127.0.0.1", "--worker-startup-check-interval", "1", "--log-level", "warn",
            "--max-concurrent-requests", "-1", *extra], dict(HF_ENDPOINT="http://127.0.0.1:9")

def vllm(port, urls, policy, extra=()):
    return [f"{V}/vllmr/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", policy,
            "--prometheus-port", str(port + 10000), "--prometheus-host", "127.0.0.1", "--worker-startup-check-interval", "1", "--log-level", "warning", *extra], {}

def litellm(port, urls, strategy="simple-shuffle", workers=1, extra=""):
    ml = "".join(f"""
  - model_name: mock-model
    litellm_params: {{model: openai/mock-model, api_base: "{u}/v1", api_key: sk-none}}
    model_info: {{id: "w{i}"}}""" for i, u in enumerate(urls))
    c = _write(f"litellm-{port}.yaml", f"""model_list:{ml}
router_settings: {{routing_strategy: {strategy}, num_retries: 0{extra}}}
litellm_settings: {{num_retries: 0, request_timeout: 600, telemetry: false}}
""")
    return [f"{V}/lite/bin/litellm", "--config", c, "--host", "127.0.0.1", "--port", str(port), "--num_workers", str(workers), "--telemetry", "False"], \
           dict(LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_MODE="PRODUCTION", LITELLM_LOG="ERROR", NO_DOCS="True", LITELLM_MASTER_KEY=KEY)

def gw(script, *flags):
    return lambda port, urls: ([PY, f"{G}/{script}", *flags, str(port), *urls], {})

def asgi(app, kind, client=""):
    def f(port, urls):
        if kind == "granian":
            return [f"{V}/base/bin/granian", "--interface", "rsgi", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--loop", "uvloop", "--no-ws", "--log-level", "error", "--backlog", "4096", app], \
                   dict(UPSTREAMS=",".join(urls), GW_CLIENT=client, PYTHONPATH=G)
        return [PY, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "error", app], dict(UPSTREAMS=",".join(urls), PYTHONPATH=G)
    return f

def headwater(port, urls, root=ROOT):
    """As it is shipped: metrics, ledger, access log, admission limits; no Redis.  Each instance has a state folder of its own."""
    d = f"{RUN}/headwater-{port}"; shutil.rmtree(d, ignore_errors=True); os.makedirs(d)
    return [OURS, "-P", "-m", "gateway", "--workers", ",".join(urls), "--port", str(port), "--admin-port", str(port + 10000),
            "--redis", "none", "--ledger", f"{d}/ledger"], dict(PYTHONPATH=root)

TUNED = ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.2")
TARGETS = {
    "ours": headwater,
    "nginx-rr": nginx_proxy,
    "sglang-rr": lambda p, u: sgl(p, u, "round_robin"),
    "sglang-cache": lambda p, u: sgl(p, u, "cache_aware"),
    "vllm-rr": lambda p, u: vllm(p, u, "round_robin"),
    "vllm-cache": lambda p, u: vllm(p, u, "cache_aware"),
    "litellm": litellm,
    "py-aiohttp": gw("gw_aiohttp.py"),
    "py-aiohttp+rawclient": gw("gw_aiohttp_raw.py"),
    "py-aiohttp.Server+rawclient": gw("gw_aiosrv_raw.py"),
    "py-raw-httptools": gw("gw_raw.py", "--httptools"),
    "py-raw-handparse": gw("gw_raw.py", "--pico"),
    "py-full-app+rawclient": gw("gw_full.py", "app"),
    "py-full-Server+rawclient": gw("gw_full.py", "aiohttp"),
    "py-full-raw": gw("gw_full.py", "raw"),
    "py-granian+aiohttp": asgi("gw_rsgi:app", "granian", "aiohttp"),
    "py-granian+rawclient": asgi("gw_rsgi:app", "granian", "raw"),
    "py-starlette+httpx": asgi("gw_asgi_httpx:app", "uvicorn"),
}
ROUTING = {
    "ours": headwater,
    "nginx-rr": nginx_proxy,
    "nginx-leastconn": lambda p, u: nginx_proxy(p, u, policy="least_conn;"),
    "nginx-hash-session": lambda p, u: nginx_proxy(p, u, policy="hash $http_x_session_id consistent;"),
    "sglang-rr": lambda p, u: sgl(p, u, "round_robin"),
    "sglang-random": lambda p, u: sgl(p, u, "random"),
    "sglang-p2c": lambda p, u: sgl(p, u, "power_of_two"),
    "sglang-cache": lambda p, u: sgl(p, u, "cache_aware"),
    "sglang-cache-tuned": lambda p, u: sgl(p, u, "cache_aware", TUNED),
    "litellm-shuffle": litellm,
    "vllm-rr": lambda p, u: vllm(p, u, "round_robin"),
    "vllm-random": lambda p, u: vllm(p, u, "random"),
    "vllm-p2c": lambda p, u: vllm(p, u, "power_of_two"),
    "vllm-cache": lambda p, u: vllm(p, u, "cache_aware"),
    "vllm-cache-tuned": lambda p, u: vllm(p, u, "cache_aware", TUNED),
    "vllm-conshash": lambda p, u: vllm(p, u, "consistent_hash"),
    "vllm-sticky": lambda p, u: vllm(p, u, "sticky_least_loaded"),
    "py-full-demo": gw("gw_full.py", "aiohttp"),
    "litellm-promptcache": lambda p, u: litellm(p, u, "simple-shuffle", 1, ", optional_pre_call_checks: [prompt_caching]"),
    "litellm-leastbusy": lambda p, u: litellm(p, u, "least-busy"),
}
if BEFORE:
    TARGETS["before"] = ROUTING["before"] = lambda p, u: headwater(p, u, BEFORE)
