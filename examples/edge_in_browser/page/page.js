// An edge in a web page: onnxruntime-web runs a head that `edge-client export` wrote, `fetch` sends what crosses.
import * as ort from "./ort.wasm.min.mjs";

const $ = (id) => document.getElementById(id);
const board = $("board").getContext("2d", { willReadFrequently: true });
const datatypes = { float32: "FP32", float64: "FP64", int32: "INT32", int64: "INT64" };
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;

const manifest = await (await fetch("heads/manifest.json")).json();
const weights = new Uint8Array(await (await fetch("heads/weights.bin")).arrayBuffer());
const sessions = new Map();

async function sessionOf(head) {
  if (!sessions.has(head.cut)) {
    const file = new Uint8Array(await (await fetch(`heads/${head.file}`)).arrayBuffer());
    sessions.set(head.cut, await ort.InferenceSession.create(file, { externalData: [{ path: "weights.bin", data: weights }] }));
  }
  return sessions.get(head.cut);
}

// The canvas as the manifest's `preprocess` says, for pictures of one channel and of three.
function pixels() {
  const { size, mode, scale, mean, std, layout } = manifest.preprocess;
  const [height, width] = size;
  const small = new OffscreenCanvas(width, height).getContext("2d");
  small.imageSmoothingQuality = "high";
  small.drawImage($("board"), 0, 0, width, height);
  const { data } = small.getImageData(0, 0, width, height);
  const channels = mode === "L" ? 1 : 3;
  const values = new Float32Array(channels * width * height);
  for (let at = 0; at < width * height; at++) {
    const [red, green, blue] = data.subarray(4 * at, 4 * at + 3);
    const gray = Math.round(0.299 * red + 0.587 * green + 0.114 * blue);
    for (let channel = 0; channel < channels; channel++) {
      const value = ((channels === 1 ? gray : data[4 * at + channel]) / 255) * scale;
      const place = layout === "NCHW" ? channel * width * height + at : at * channels + channel;
      values[place] = (value - mean[channel % mean.length]) / std[channel % std.length];
    }
  }
  return new ort.Tensor("float32", values, manifest.inputs[0][2]);
}

// What crosses, as the Open Inference Protocol's binary extension: a header in JSON, then each tensor's elements.
async function tail(head, crossing) {
  const parts = head.crossing.map(([name, dtype]) => {
    const shape = crossing[name].dims;
    const { buffer, byteOffset, byteLength } = crossing[name].data;
    const bytes = new Uint8Array(buffer, byteOffset, byteLength);
    return { bytes, entry: { name, shape, datatype: datatypes[dtype], parameters: { binary_data_size: byteLength } } };
  });
  const header = new TextEncoder().encode(
    JSON.stringify({ parameters: { isthmus_weights: manifest.weights }, inputs: parts.map(({ entry }) => entry) }),
  );
  const answer = await fetch(`/v2/models/${encodeURIComponent(`${manifest.model}@${head.cut}`)}/infer`, {
    method: "POST",
    headers: { "Inference-Header-Content-Length": `${header.length}`, "Content-Type": "application/octet-stream" },
    body: new Blob([header, ...parts.map(({ bytes }) => bytes)]),
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  const sent = parts.reduce((sum, { bytes }) => sum + bytes.length, 0);
  return { scores: found.outputs.find(({ name }) => name === manifest.outputs[0]).data, sent };
}

function say(text, wrong = false) {
  $("state").textContent = text;
  $("state").className = wrong ? "wrong" : "";
}

async function ask() {
  const head = manifest.heads[$("cut").value];
  $("ask").disabled = true;
  $("answer").textContent = "";
  try {
    const session = await sessionOf(head);
    const began = performance.now();
    const crossing = await session.run({ [manifest.inputs[0][0]]: pixels() });
    const between = performance.now();
    const { scores, sent } = await tail(head, crossing);
    const ended = performance.now();
    const exps = scores.map((score) => Math.exp(score - Math.max(...scores)));
    const best = scores.indexOf(Math.max(...scores));
    const share = (100 * exps[best]) / exps.reduce((sum, one) => sum + one, 0);
    $("answer").textContent = `${manifest.labels[best] ?? best}  (${share.toFixed(1)} %)`;
    const times = { head: between - began, tail: ended - between };
    for (const [id, took] of Object.entries(times)) {
      $(id).textContent = `${took.toFixed(1)} ms`;
      $(`${id}-bar`).style.width = `${(100 * took) / (ended - began)}%`;
    }
    $("bytes").textContent = sent.toLocaleString("en");
    say(`${manifest.model}, cut after ${head.cut}: answered`);
  } catch (error) {
    say(`${error.message}`, true);
  } finally {
    $("ask").disabled = false;
  }
}

function clear() {
  board.fillStyle = "#000";
  board.fillRect(0, 0, 256, 256);
}

function draw(event) {
  if (!event.buttons) return;
  const { left, top } = $("board").getBoundingClientRect();
  board.fillStyle = "#fff";
  board.beginPath();
  board.arc(event.clientX - left, event.clientY - top, 13, 0, 2 * Math.PI);
  board.fill();
}

$("cut").max = manifest.heads.length - 1;
$("cut").addEventListener("input", () => ($("name").textContent = manifest.heads[$("cut").value].cut));
$("cut").dispatchEvent(new Event("input"));
$("cut").addEventListener("change", ask);
$("ask").addEventListener("click", ask);
$("clear").addEventListener("click", clear);
$("board").addEventListener("pointermove", draw);
$("board").addEventListener("pointerdown", draw);
$("file").addEventListener("change", async () => {
  const picture = await createImageBitmap($("file").files[0]);
  clear();
  board.imageSmoothingEnabled = false;
  board.drawImage(picture, 0, 0, 256, 256);
  await ask();
});
clear();
say(`${manifest.model}: ${manifest.heads.length} cuts. Draw, or take a picture.`);
