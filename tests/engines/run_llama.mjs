// Generates a few tokens with llama.cpp, always the most likely one, and prints them as one JSON line.
//
//   node run_llama.mjs PATH [--no-mmap] [--wait]
//
// --wait generates again for each line of stdin, until that ends.
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [path, ...flags] = process.argv.slice(2);
// An import does not look at NODE_PATH; require does.
const entry = createRequire(import.meta.url).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(entry).href);

const llama = await getLlama({build: "never", gpu: false, logLevel: "error", progressLogs: false});
const model = await llama.loadModel({modelPath: path, useMmap: !flags.includes("--no-mmap")});
const context = await model.createContext({contextSize: 64, threads: 1});

async function generate() {
  const sequence = context.getSequence();
  const tokens = [];
  for await (const token of sequence.evaluate(model.tokenize("a robot sees"), {temperature: 0})) {
    tokens.push(token);
    if (tokens.length === 8) break;
  }
  sequence.dispose();
  console.log(JSON.stringify({tokens}));
}

await generate();
if (flags.includes("--wait")) for await (const _ of createInterface({input: process.stdin})) await generate();
process.exit(0);
