// Runs model.onnx of engine_models.py with ONNX Runtime and prints what came out, as one JSON line.
//
//   node run_onnx.cjs PATH [--touch] [--wait]
//
// --touch looks up a row in every page of a table of 65,536 rows first; --wait keeps the model until stdin ends.
"use strict";
const ort = require("onnxruntime-node");

async function main() {
  const [path, ...flags] = process.argv.slice(2);
  const options = {intraOpNumThreads: 1, interOpNumThreads: 1, extra: {session: {disable_prepacking: "1"}}};
  const session = await ort.InferenceSession.create(path, options);
  if (flags.includes("--touch")) {
    for (let row = 0n; row < 65536n; row += 64n) {
      const pages = BigInt64Array.from([row, row + 16n, row + 32n, row + 48n]);
      await session.run({ids: new ort.Tensor("int64", pages, [4])});
    }
  }
  const ids = new ort.Tensor("int64", BigInt64Array.from([0n, 1n, 7n, 200n]), [4]);
  const {y} = await session.run({ids});
  console.log(JSON.stringify({engine: `onnxruntime ${ort.env.versions.node}`, dims: y.dims, y: Array.from(y.data)}));
  if (flags.includes("--wait")) {
    process.stdin.resume();
    await new Promise((resolve) => process.stdin.on("end", resolve));
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
