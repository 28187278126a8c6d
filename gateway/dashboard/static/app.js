// The dashboard: draws each state that /dashboard/events sends. Text goes in as text, never as markup.
"use strict";
(() => {
  const STACK = ["delivered", "stale_index", "token_mismatch", "unreported", "diverted_for_load", "draining", "policy", "isolation", "evicted", "cold", "tail"];
  const LOSSES = ["evicted", "diverted_for_load", "draining", "policy", "isolation", "stale_index", "token_mismatch", "unreported", "cold", "tail"];
  const MEANS = {
    evicted: "seen before, on no worker now", diverted_for_load: "another worker was expected to answer sooner",
    draining: "held only by a worker being shut down", policy: "a policy that does not look for them",
    isolation: "held for another tenant", stale_index: "dropped before the request came",
    token_mismatch: "other tokens in the engine", unreported: "the engine does not tell",
    cold: "never seen before", tail: "the last block and token",
  };
  const REASONS = {
    only: "only worker that could take it", holder: "held most, cheapest in all", equal: "several held as much; cheapest of them",
    cheaper: "another held more, but dearer", copy: "another held more; one more copy pays off", no_overlap: "nobody held any; cheapest by load", policy: "a policy without costs", rejected: "nobody could take it",
  };
  const STEPS = 90;
  const $ = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const fill = (parent, nodes) => parent.replaceChildren(...nodes);
  const size = (value, axis, percent) => { value.style[axis] = `${Math.max(0, Math.min(100, percent)).toFixed(2)}%`; return value; };

  const percent = (part, whole) => {
    if (!whole) return "-";
    const value = 100 * part / whole;
    if (part && value < 0.05) return "<0.1 %";
    if (part < whole && value >= 99.95) return ">99.9 %";
    return `${value.toFixed(1)} %`;
  };
  const count = (n) => n >= 1e9 ? `${(n / 1e9).toFixed(2)} G` : n >= 1e6 ? `${(n / 1e6).toFixed(2)} M` : n >= 1e4 ? `${(n / 1e3).toFixed(1)} k` : n.toLocaleString("en");
  const seconds = (s) => s === null || s === undefined ? "-" : s >= 1 ? `${s.toFixed(2)} s` : `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms`;
  const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");

  const bar = (parts, label) => {
    const outer = make("div", "bar thin");
    outer.setAttribute("role", "img");
    outer.setAttribute("aria-label", label);
    for (const [name, share] of parts) if (share > 0) outer.append(size(make("i", `k ${name}`), "width", 100 * share));
    return outer;
  };
  const row = (cells) => {
    const line = make("tr");
    cells.forEach(([content, className], at) => {
      const cell = make(at ? "td" : "th", className || "");
      if (!at) cell.scope = "row";
      cell.append(content);
      line.append(cell);
    });
    return line;
  };

  function tiles(state) {
    const recent = state.window.totals, all = state.totals;
    const hit = state.window.ttft_hit_s, none = state.window.ttft_none_s;
    const both = hit !== null && none !== null && none > 0;
    const lower = both ? 100 * (1 - hit / none) : 0;
    const values = [
      [percent(recent.delivered, recent.prompt), "of prompt tokens came from a cache (15 min)"],
      [percent(recent.delivered, recent.available), "of what some worker held was delivered (15 min)"],
      [both ? `${Math.abs(lower).toFixed(0)} %` : "-", `${lower >= 0 ? "lower" : "higher"} median time to first token with a hit (15 min)`],
      [count(recent.requests), "requests in 15 min"],
      [count(all.delivered), "prompt tokens not computed again since the start"],
      [percent(recent.stale_index + recent.token_mismatch + recent.gained, recent.prompt), "of prompt tokens predicted wrongly (15 min)"],
    ];
    fill($("tiles"), values.map(([value, text], at) => {
      const tile = make("div", at ? "tile" : "tile first");
      tile.append(make("b", "", value), text);
      return tile;
    }));
  }

  function tokens(series) {
    const length = series.requests.length;
    const at = (name, step) => (series[name] || [])[step] || 0;
    const top = Math.max(1, ...Array.from({ length }, (_, step) => at("prompt", step)));
    const columns = [];
    for (let step = length - STEPS; step < length; step++) {
      const column = make("div", "col");
      if (step >= 0) {
        let over = at("gained", step);
        const parts = STACK.map((name) => [name, at(name, step)]);
        for (const part of [...parts].reverse()) { const taken = Math.min(over, part[1]); part[1] -= taken; over -= taken; }
        for (const [name, value] of parts) if (value) column.append(size(make("i", `k ${name}`), "height", 100 * value / top));
        column.title = `${count(at("prompt", step))} tokens, ${percent(at("delivered", step), at("prompt", step))} delivered`;
      }
      columns.push(column);
    }
    fill($("tokens-cols"), columns);
    $("tokens-max").textContent = `${count(top)} tokens in ${series.step_s} s`;
    const sum = (name) => (series[name] || []).reduce((a, b) => a + b, 0);
    $("tokens").setAttribute("aria-label", `Prompt tokens over the last fifteen minutes: ${count(sum("prompt"))}, ${percent(sum("delivered"), sum("prompt"))} of them delivered from a cache`);
    fill($("tokens-legend"), STACK.filter((name) => sum(name)).map((name) => {
      const item = make("li");
      item.append(make("span", `k ${name}`), name);
      return item;
    }));
  }

  function times(series) {
    const length = series.requests.length;
    const top = Math.max(0, ...series.ttft_hit_s, ...series.ttft_none_s);
    const lines = [];
    for (const [name, values] of [["hit-line", series.ttft_hit_s], ["none-line", series.ttft_none_s]]) {
      let run = [];
      const end = () => {
        if (!run.length) return;
        if (run.length === 1) run = [[run[0][0] - 0.3, run[0][1]], [run[0][0] + 0.3, run[0][1]]];
        const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
        line.setAttribute("class", name);
        line.setAttribute("points", run.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join(" "));
        lines.push(line);
        run = [];
      };
      values.forEach((value, step) => {
        if (value === null) { end(); return; }
        run.push([100 * (step + 0.5 + STEPS - length) / STEPS, 100 - 94 * value / (top || 1)]);
      });
      end();
    }
    fill($("ttft-lines"), lines);
    $("ttft-max").textContent = top ? seconds(top) : "";
    const last = (values) => seconds([...values].reverse().find((value) => value !== null));
    $("ttft").setAttribute("aria-label", `Median time to first token: with a hit ${last(series.ttft_hit_s)}, without ${last(series.ttft_none_s)} in the newest step that has any`);
  }

  function losses(totals) {
    const largest = Math.max(1, ...LOSSES.map((name) => totals[name]));
    fill($("losses"), LOSSES.map((name) => {
      const line = make("div", "loss");
      line.append(make("code", "", name), bar([[name, totals[name] / largest]], `${name}: ${percent(totals[name], totals.prompt)}`), make("b", "", percent(totals[name], totals.prompt)), make("span", "soft", MEANS[name]));
      if (!totals[name]) line.classList.add("none");
      return line;
    }));
  }

  const trouble = (worker) => (worker.state === "ready" ? 0 : 4) + ({ exact: 0, learned: 1, blind: 2 })[worker.trust];
  const orders = {
    id: (a, b) => a.id.localeCompare(b.id, "en", { numeric: true }),
    queue: (a, b) => b.queue_s - a.queue_s || b.inflight - a.inflight,
    hits: (a, b) => a.cached_tokens / (a.prompt_tokens || 1) - b.cached_tokens / (b.prompt_tokens || 1),
    trouble: (a, b) => trouble(b) - trouble(a),
  };
  function workers(list) {
    const ready = list.filter((worker) => worker.state === "ready").length;
    const exact = list.filter((worker) => worker.trust === "exact").length;
    $("workers-sum").textContent = `${list.length} known, ${ready} ready; the index is exact for ${exact}.`;
    const ordered = [...list].sort(orders[$("workers-order").value]);
    fill($("workers"), ordered.map((worker) => {
      const mark = (kind, text, title) => { const tag = make("span", `tag ${kind}`, text); if (title) tag.title = title; return tag; };
      const total = worker.blocks_total;
      const cache = total
        ? bar([["used", worker.blocks_used / total], ["delivered", worker.blocks_cached / total]], `${worker.blocks_used} of ${total} blocks held, ${worker.blocks_cached} reusable`)
        : make("span", "soft", "not told");
      const share = worker.prompt_tokens ? worker.cached_tokens / worker.prompt_tokens : 0;
      const hits = make("div", "hits");
      hits.append(bar([["delivered", share]], `${percent(worker.cached_tokens, worker.prompt_tokens)} delivered`), make("span", "", percent(worker.cached_tokens, worker.prompt_tokens)));
      return row([
        [worker.id, "name"], [mark(worker.state, worker.state, worker.reason), "left"], [mark(worker.trust, worker.trust, worker.trust_reason), "left"],
        [cache, "left"], [count(worker.index_blocks)], [String(worker.inflight)], [String(worker.waiting)], [seconds(worker.queue_s)], [count(worker.requests)], [hits, "left"],
      ]);
    }));
  }

  function families(list) {
    fill($("families"), list.map((family) => {
      const hits = make("div", "hits");
      hits.append(bar([["delivered", family.delivered / (family.prompt || 1)]], `${percent(family.delivered, family.prompt)} delivered`), make("span", "", percent(family.delivered, family.prompt)));
      return row([[make("code", "", family.family)], [count(family.requests)], [count(family.prompt)], [hits, "left"]]);
    }));
  }

  function reasons(counts) {
    const known = Object.entries(counts).sort((a, b) => b[1] - a[1]);
    const all = known.reduce((sum, [, n]) => sum + n, 0);
    fill($("reasons"), known.map(([code, n]) => {
      const line = make("div", "loss");
      line.append(make("code", "", code), bar([["captured", n / all]], `${code}: ${n} requests`), make("b", "", percent(n, all)), make("span", "soft", REASONS[code] || ""));
      return line;
    }));
  }

  let shown = "";
  function recent(list) {
    if ($("hold").checked || $("recent").contains(document.activeElement)) return;
    const key = list.map((one) => one.id + one.final).join();
    if (key === shown) return;
    shown = key;
    fill($("recent"), list.map((one) => {
      const open = make("button", "plain", one.id);
      open.type = "button";
      open.addEventListener("click", () => detail(one.id));
      return row([
        [clock(one.at)], [open, "left"], [one.model, "left name"], [one.worker || "-", "left name"], [one.final ? one.outcome : `${one.outcome}, tried again`, "left"],
        [count(one.prompt)], [one.reported ? count(one.delivered) : "not told"], [seconds(one.ttft_s)], [one.reason, "left"],
      ]);
    }));
  }

  const pairs = (title, values) => {
    const list = make("dl");
    for (const [name, value] of values) if (value !== null && value !== undefined && value !== "") list.append(make("dt", "", name), make("dd", "", String(value)));
    const box = make("div");
    box.append(make("h3", "", title), list);
    return box;
  };
  function attempt(one) {
    const request = one.request, body = make("div", "attempt");
    body.append(make("p", "why", one.reason || "No reason was recorded."));
    const facts = make("div", "two");
    facts.append(
      pairs("Request", [["id", request.request_id], ["client's id", request.client_id], ["arrived", clock(request.at)], ["route", request.route], ["model", request.model], ["family", request.family], ["attempt", request.attempt], ["outcome", `${request.outcome} (${request.status})`], ["policy", one.policy], ["worker", one.choice]]),
      pairs("Time", [["to decision", seconds(request.decided_s)], ["to first token, expected", seconds(one.predicted_ttft_s)], ["to first token", seconds(request.ttft_s)], ["between tokens", seconds(request.itl_s)], ["in all", seconds(request.total_s)], ["answer tokens", request.output_tokens]]),
      pairs("Prompt tokens", Object.entries(request.flow)),
      pairs("Known at the decision", Object.entries(one.overlap || {}).map(([name, value]) => [name.replaceAll("_", " "), value])),
    );
    body.append(facts);
    if (one.workers.length) {
      const terms = [...new Set(one.workers.flatMap((worker) => Object.keys(worker.parts)))].filter((name) => one.workers.some((worker) => worker.parts[name]));
      const unit = one.policy === "cost" ? seconds : (value) => value === undefined ? "-" : value.toPrecision(3);
      const table = make("table"), head = make("tr");
      for (const name of ["worker", "trust", "matched", "in flight", "cost", ...terms]) { const cell = make("th", "", name); cell.scope = "col"; head.append(cell); }
      const top = make("thead"), rest = make("tbody");
      top.append(head);
      for (const worker of one.workers) rest.append(row([[`${worker.id === one.choice ? "→ " : ""}${worker.id}`], [worker.trust], [count(worker.matched_tokens)], [String(worker.inflight)], [unit(worker.cost_s)], ...terms.map((name) => [unit(worker.parts[name])])]));
      table.append(top, rest);
      const box = make("div", "scroll");
      box.append(table);
      body.append(make("h3", "", one.candidates > one.workers.length ? `The first ${one.workers.length} of ${one.candidates} candidates, best first` : "Candidates, best first"), box);
    }
    return body;
  }
  async function detail(id) {
    const body = $("detail-body");
    $("detail-title").textContent = "Request";
    fill(body, [make("p", "soft", "loading")]);
    $("detail").showModal();
    try {
      const answer = await fetch(`/admin/requests/${encodeURIComponent(id)}`);
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.error.message);
      fill(body, told.attempts.map(attempt));
    } catch (error) {
      fill(body, [make("p", "", error.message)]);
    }
  }

  let last = null;
  function draw(state) {
    last = state;
    $("sub").textContent = `${count(state.totals.requests)} requests with ${count(state.totals.prompt)} prompt tokens since the start; ${clock(state.at)}`;
    tiles(state); tokens(state.series); times(state.series); losses(state.window.totals);
    workers(state.workers); families(state.families); reasons(state.reasons); recent(state.recent);
  }
  const say = (text, good) => { $("link").textContent = text; $("link").className = good ? "pill good" : "pill bad"; };
  const source = new EventSource("/dashboard/events");
  source.addEventListener("state", (event) => { say("live", true); if (!document.hidden) draw(JSON.parse(event.data)); });
  source.addEventListener("error", () => say("no connection, trying again", false));
  $("workers-order").addEventListener("change", () => { if (last) workers(last.workers); });
})();
