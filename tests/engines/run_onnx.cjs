// Runs model.onnx of engine_models.py with ONNX Runtime and prints what came out, as one JSON line.
//
//   node run_onnx.cjs PATH [--link-too] [--touch] [--wait]
//
// --link-too runs what PATH links to as well, which has to give the same; --touch looks up a row in every page
// of a table of 65,536 rows first; --wait keeps the model until stdin ends.
"use strict";
const assert = require("node:assert");
const fs = require("node:fs");
const ort = require("onnxruntime-node");

const OPTIONS = {intraOpNumThreads: 1, interOpNumThreads: 1, extra: {session: {disable_prepacking: "1"}}};

async function lookUp(session, rows) {
  const {y} = await session.run({ids: new ort.Tensor("int64", BigInt64Array.from(rows), [4])});
  return {dims: y.dims, y: Array.from(y.data)};
}

async function main() {
  const [path, ...flags] = process.argv.slice(2);
  const session = await ort.InferenceSession.create(path, OPTIONS);
  if (flags.includes("--touch")) {
    for (let row = 0n; row < 65536n; row += 64n) await lookUp(session, [row, row + 16n, row + 32n, row + 48n]);
  }
  const rows = [0n, 1n, 7n, 200n];
  const answer = await lookUp(session, rows);
  if (flags.includes("--link-too")) {
    const link = fs.readlinkSync(path);
    assert.match(link, /^\/proc\/self\/fd\/\d+$/);
    assert.deepStrictEqual(await lookUp(await ort.InferenceSession.create(link, OPTIONS), rows), answer);
  }
  console.log(JSON.stringify(answer));
  if (flags.includes("--wait")) {
    process.stdin.resume();
    await new Promise((resolve) => process.stdin.on("end", resolve));
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
