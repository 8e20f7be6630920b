// An edge in JavaScript: the head of a model in onnxruntime-web, its tail on a cloud-server, by the Open Inference Protocol.
//
//   edge-client export --model digits --split stage2.0.conv2 --output heads      (where PyTorch is)
//   cloud-server --model digits --tails stage2.0.conv2 --rest-port 8000
//   npm ci && node edge.js http://127.0.0.1:8000 heads ../../shared_hooks/models/digits/images/*.png
//
// Shares no code with Isthmus: the manifest beside the heads says all that is needed.

import { readFile } from "node:fs/promises";
import path from "node:path";
import * as ort from "onnxruntime-web";
import { PNG } from "pngjs";

const [server, folder, ...pictures] = process.argv.slice(2);
const manifest = JSON.parse(await readFile(path.join(folder, "manifest.json"), "utf8"));
const [head] = manifest.heads;
const arrays = { float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array };
const datatypes = { float32: "FP32", float64: "FP64", int32: "INT32", int64: "INT64" };

ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(await readFile(path.join(folder, head.file)), {
  externalData: [{ path: "weights.bin", data: await readFile(path.join(folder, "weights.bin")) }],
});

// A gray picture as the manifest's `preprocess` says; of other sizes and modes it would have to be made so first.
async function pixels(file) {
  const { data, width, height } = PNG.sync.read(await readFile(file));
  const { size, scale, mean, std } = manifest.preprocess;
  if (height !== size[0] || width !== size[1]) throw new Error(`${file}: expected ${size[1]} x ${size[0]} pixels`);
  const values = Float32Array.from({ length: width * height }, (_, at) => ((data[4 * at] / 255) * scale - mean[0]) / std[0]);
  return new ort.Tensor("float32", values, manifest.inputs[0][2]);
}

// What crosses, as the protocol's binary extension: a header in JSON, then the elements of each tensor.
async function tail(crossing) {
  const inputs = head.crossing.map(([name, dtype]) => {
    const shape = crossing[name].dims;
    const { buffer, byteOffset, byteLength } = crossing[name].data;
    const bytes = new Uint8Array(buffer, byteOffset, byteLength);
    return { bytes, entry: { name, shape, datatype: datatypes[dtype], parameters: { binary_data_size: bytes.length } } };
  });
  const header = Buffer.from(
    JSON.stringify({ parameters: { isthmus_weights: manifest.weights }, inputs: inputs.map(({ entry }) => entry) }),
  );
  const model = encodeURIComponent(`${manifest.model}@${head.cut}`);
  const answer = await fetch(`${server}/v2/models/${model}/infer`, {
    method: "POST",
    headers: { "Inference-Header-Content-Length": `${header.length}`, "Content-Type": "application/octet-stream" },
    body: Buffer.concat([header, ...inputs.map(({ bytes }) => bytes)]),
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return Object.fromEntries(found.outputs.map(({ name, data }) => [name, data]));
}

for (const file of pictures) {
  const began = performance.now();
  const crossing = await session.run({ [manifest.inputs[0][0]]: await pixels(file) });
  const done = performance.now();
  const { [manifest.outputs[0]]: scores } = await tail(crossing);
  const best = scores.indexOf(Math.max(...scores));
  const took = `head ${(done - began).toFixed(1)} ms, tail ${(performance.now() - done).toFixed(1)} ms`;
  console.log(`${path.basename(file)}  ${manifest.labels[best]}  ${took}`);
}
