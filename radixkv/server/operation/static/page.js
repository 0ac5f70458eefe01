// The page at /: polls /live once a second while it is visible, and chats over /v1/chat/completions.
// Everything that comes from a prompt or a model is set as text, never as HTML.

const ROW_HEIGHT = 24; // pixels per leaf of the tree
const MIN_NODE_WIDTH = 8; // pixels
const MAX_POINTS = 60; // of the line of recent hit rates
const SECONDS_BETWEEN_LOOKS = 1;
const MAX_SECONDS_TO_ANSWER = 10;

const $ = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en");
const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

// -- the server ---------------------------------------------------------------------------------------------------

function headers() {
  const key = sessionStorage.getItem("api-key");
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

// Why a request was refused. A proxy in between answers with a page of its own.
async function refusal(response) {
  const answer = await response.json().catch(() => null);
  return new Error(answer?.error?.message ?? `status ${response.status}`);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("api-key", $("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  refreshNow();
});

function showStatus(text, className = "") {
  // Screen readers speak whenever it is set.
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = className;
}

async function refresh() {
  try {
    const signal = AbortSignal.timeout(1000 * MAX_SECONDS_TO_ANSWER);
    const response = await fetch("live", { headers: headers(), signal });
    if (response.status === 401) {
      $("key-form").hidden = false;
      showStatus("");
      return;
    }
    if (!response.ok) throw await refusal(response);
    show(await response.json());
  } catch (error) {
    showStatus(`no answer: ${error.message}`, "alarm");
  }
}

let refreshNow = () => {}; // ends the pause between two looks

// The only one that refreshes: so no answer comes after a later one, or after the key was changed.
async function pollForever() {
  for (;;) {
    if (!document.hidden && $("key-form").hidden) await refresh();
    await new Promise((resolve) => {
      refreshNow = resolve;
      setTimeout(resolve, 1000 * SECONDS_BETWEEN_LOOKS);
    });
  }
}

// -- figures ------------------------------------------------------------------------------------------------------

const hitRates = []; // at the latest refreshes; null before any prompt

function show(state) {
  $("model").textContent = state.model;
  showStatus(state.draining ? "draining" : `RadixKV ${state.version}`);
  $("running").textContent = count(state.running);
  $("waiting").textContent = count(state.waiting);
  showBlocks(state.blocks);
  showHitRate(state.tokens);
  showTree(state.trees);
  showTiers(state.tiers);
  showRequests(state.requests);
  showReplicas(state.replicas ?? []); // of an ingress, which has no tree of its own
}

function showBlocks(blocks) {
  const [inUse, cached] = $("block-bar").children;
  inUse.style.width = `${(100 * blocks.in_use) / blocks.total}%`;
  cached.style.width = `${(100 * blocks.cached) / blocks.total}%`;
  for (const name of ["in_use", "cached", "free"]) $(`blocks-${name.replace("_", "-")}`).textContent = count(blocks[name]);
  const shown = `${plural(blocks.total, "block")} of ${blocks.block_size} tokens`;
  $("block-bar").setAttribute("aria-label", `${shown}: ${blocks.in_use} in use, ${blocks.cached} cached`);
  $("block-bar").title = shown;
}

function showHitRate(tokens) {
  const rate = tokens.queried ? tokens.reused / tokens.queried : null;
  $("hit-rate").textContent = rate === null ? "–" : `${(100 * rate).toFixed(1)} %`;
  hitRates.push(rate);
  if (hitRates.length > MAX_POINTS) hitRates.shift();
  const first = MAX_POINTS - hitRates.length; // the newest is always at the right end
  const known = hitRates.map((value, index) => [first + index, value]).filter(([, value]) => value !== null);
  const points = known.map(([index, value]) => `${(120 * index) / (MAX_POINTS - 1)},${(23 - 22 * value).toFixed(2)}`);
  $("hit-line").firstElementChild.setAttribute("points", points.join(" "));
}

function showRequests(requests) {
  showRows(
    $("requests"),
    requests.map((request) => [
      request.id + (request.sequences > 1 ? ` (${plural(request.sequences, "beam")})` : ""),
      request.state,
      count(request.prompt_tokens),
      request.cached_tokens === null ? "" : count(request.cached_tokens),
      count(request.generated_tokens),
    ]),
  );
}

function showTiers(tiers) {
  showRows(
    $("tiers"),
    tiers.map((tier) => [tier.medium, count(tier.loaded), count(tier.missed), count(tier.written)]),
  );
}

function showReplicas(replicas) {
  showRows(
    $("replicas"),
    replicas.map((replica) => [
      replica.name,
      replica.draining ? "draining" : replica.up ? "up" : "down",
      replica.generation ?? "",
      count(replica.running),
      count(replica.waiting),
      `${count(replica.cached_blocks)} of ${count(replica.blocks)}`,
    ]),
  );
  if (replicas.length === 0) return;
  $("tree-title").textContent = "Replicas";
  for (const id of ["tree-hint", "tree-empty", "tree-legend"]) $(id).hidden = true;
}

function showRows(table, rows) {
  table.hidden = rows.length === 0;
  table.tBodies[0].replaceChildren(
    ...rows.map((cells) => {
      const row = document.createElement("tr");
      for (const text of cells) row.insertCell().textContent = text;
      return row;
    }),
  );
}

// -- the tree -----------------------------------------------------------------------------------------------------
//
//   | shared by all of these          | one's own rest   |     a node is as wide as it has tokens, and as high as
//   |                                 | another's |            there are leaves after it

const boxes = new Map(); // path of keys -> element, so that nodes move instead of being redrawn

function showTree(trees) {
  const canvas = $("tree");
  const scale = fittingScale(trees, canvas.clientWidth);
  const drawn = new Set();
  let row = 0;
  for (const tree of trees) {
    const path = `namespace ${tree.namespace}`;
    if (tree.namespace) {
      positionBox(canvas, path, 0, row++, canvas.clientWidth, 1, drawn, (box) => {
        box.className = "namespace";
        box.textContent = tree.namespace;
      });
    }
    for (const child of tree.children) row += drawNode(canvas, child, path, 0, row, scale, drawn);
    if (tree.hidden) row += drawHidden(canvas, tree.hidden, path, 0, row, drawn);
  }
  for (const [path, box] of boxes) {
    if (!drawn.has(path)) {
      box.remove();
      boxes.delete(path);
    }
  }
  canvas.style.height = `${row * ROW_HEIGHT}px`;
  $("tree-empty").hidden = row > 0;
  const focused = canvas.querySelector(":hover, :focus");
  if (focused?.describe) focused.describe();
  else $("detail").textContent = "";
}

function drawNode(canvas, node, parentPath, left, row, scale, drawn) {
  const path = `${parentPath}/${node.key}`;
  const width = widthOf(node, scale);
  let rows = 0;
  for (const child of node.children) rows += drawNode(canvas, child, path, left + width, row + rows, scale, drawn);
  if (node.hidden) rows += drawHidden(canvas, node.hidden, path, left + width, row + rows, drawn);
  rows = Math.max(rows, 1);
  positionBox(canvas, path, left, row, width, rows, drawn, (box) => {
    box.className = node.users ? "node used" : "node";
    box.style.setProperty("--fresh", (0.3 + 0.7 / (1 + node.age / 60)).toFixed(3));
    box.textContent = width > 40 ? node.text : "";
    box.tabIndex = 0;
    box.role = "img";
    box.ariaLabel = `${sizeOf(node)}: ${node.text}`;
    box.describe = () => describe(node);
  });
  return rows;
}

function drawHidden(canvas, number, parentPath, left, row, drawn) {
  positionBox(canvas, `${parentPath}/hidden`, left, row, 160, 1, drawn, (box) => {
    box.className = "namespace";
    box.textContent = `and ${count(number)} more`;
  });
  return 1;
}

function positionBox(canvas, path, left, row, width, rows, drawn, fill) {
  let box = boxes.get(path);
  if (box === undefined) {
    box = document.createElement("div");
    boxes.set(path, box);
    canvas.append(box);
  }
  drawn.add(path);
  fill(box);
  Object.assign(box.style, {
    left: `${left}px`,
    top: `${row * ROW_HEIGHT}px`,
    width: `${width}px`,
    height: `${rows * ROW_HEIGHT}px`,
  });
}

const widthOf = (node, scale) => Math.max(MIN_NODE_WIDTH, node.tokens * scale);

// Pixels per token, so that the longest path just fits.
function fittingScale(trees, width) {
  const longest = (children, scale) =>
    Math.max(0, ...children.map((node) => widthOf(node, scale) + longest(node.children, scale)));
  let low = 0;
  let high = 4;
  for (let step = 0; step < 20; step++) {
    const middle = (low + high) / 2;
    const needed = Math.max(0, ...trees.map((tree) => longest(tree.children, middle)));
    if (needed > width) high = middle;
    else low = middle;
  }
  return low;
}

const sizeOf = (node) => `${plural(node.tokens, "token")} in ${plural(node.blocks, "block")}`;

function describe(node) {
  const when = node.age < 1 ? "just now" : `${count(Math.round(node.age))} s ago`;
  const use = node.users ? `used by ${plural(node.users, "sequence")} now` : `not in use, last used ${when}`;
  const title = document.createElement("b");
  title.textContent = `${sizeOf(node)}, ${use}`;
  $("detail").replaceChildren(title, document.createElement("br"), `${node.text} …`);
}

for (const name of ["mouseover", "focusin"]) {
  $("tree").addEventListener(name, (event) => event.target.describe?.());
}

// -- chat ---------------------------------------------------------------------------------------------------------

let messages = [];
let asking = new AbortController();

function addMessage(kind, text) {
  const box = document.createElement("div");
  box.className = `message ${kind}`;
  box.textContent = text;
  $("messages").append(box);
  showNewest();
  return box;
}

// Not scrollIntoView, which would move the whole page.
function showNewest() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:") && line.slice(5).trim() !== "[DONE]") yield JSON.parse(line.slice(5));
    }
  }
}

async function ask(question) {
  const chat = messages;
  chat.push({ role: "user", content: question });
  asking = new AbortController();
  addMessage("user", question);
  const box = addMessage("assistant", "");
  const startTime = performance.now();
  let thoughts = "";
  let answer = "";
  let firstText = null;
  let usage = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      signal: asking.signal,
      body: JSON.stringify({
        messages: chat,
        max_tokens: 200,
        temperature: 0,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw await refusal(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      thoughts += delta.reasoning ?? "";
      answer += delta.content ?? "";
      box.textContent = answer || thoughts; // what a model thinks is shown until its answer begins
      box.classList.toggle("thoughts", !answer);
      if (firstText === null && box.textContent) firstText = performance.now();
      usage = event.usage ?? usage;
      showNewest();
    }
    chat.push({ role: "assistant", content: answer });
    if (chat === messages && usage !== null) showReuse(usage, (firstText ?? performance.now()) - startTime);
  } catch (error) {
    chat.pop();
    box.className = "message failed";
    box.textContent = error.message;
  }
}

function showReuse(usage, firstTextMs) {
  const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const box = document.createElement("p");
  box.className = "reuse";
  const bar = document.createElement("i");
  bar.style.setProperty("--reused-share", `${(100 * reused) / usage.prompt_tokens}%`);
  const computed = usage.prompt_tokens - reused;
  const loaded = Object.entries(usage.prompt_tokens_details?.loaded_tokens ?? {});
  const tiers = loaded.map(([medium, tokens]) => ` (${count(tokens)} from ${medium})`).join("");
  const { accepted_prediction_tokens: drafted = 0, rejected_prediction_tokens: rejected = 0 } =
    usage.completion_tokens_details ?? {};
  const drafts = drafted ? `; ${count(drafted)} of ${plural(usage.completion_tokens, "token")} by drafts, ${count(rejected)} drafted in vain` : "";
  const text = `${count(reused)} of ${plural(usage.prompt_tokens, "prompt token")} reused${tiers}, ${count(computed)} computed; first text after ${(firstTextMs / 1000).toFixed(2)} s${drafts}`;
  box.append(bar, text);
  $("messages").append(box);
  showNewest();
}

$("chat-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || $("send").disabled) return;
  $("question").value = "";
  $("send").disabled = true;
  $("messages").ariaBusy = "true"; // so that screen readers speak the whole answer, not each piece
  await ask(question);
  $("messages").ariaBusy = "false";
  $("send").disabled = false;
  refreshNow();
});

$("question").addEventListener("keydown", (event) => {
  // While a word is composed, as in Japanese, Enter ends the word.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});

$("new-chat").addEventListener("click", () => {
  asking.abort();
  messages = [];
  $("messages").replaceChildren();
  $("question").focus();
});

window.addEventListener("resize", () => refreshNow());
pollForever();
