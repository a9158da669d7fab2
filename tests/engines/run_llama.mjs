// Generates a few tokens with llama.cpp, always the most likely one, and prints them as one JSON line.
//
//   node run_llama.mjs PATH [--link-too] [--wait]
//
// --link-too loads what PATH links to as well, which has to say the same; --wait generates again for each line
// of stdin, until that ends.
import assert from "node:assert";
import fs from "node:fs";
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [path, ...flags] = process.argv.slice(2);
// An import does not look at NODE_PATH; require does.
const entry = createRequire(import.meta.url).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(entry).href);
const llama = await getLlama({build: "never", gpu: false, logLevel: "error", progressLogs: false});

async function load(modelPath) {
  const model = await llama.loadModel({modelPath, useMmap: true});
  const context = await model.createContext({contextSize: 64, threads: 1});
  return async () => {
    const sequence = context.getSequence();
    const tokens = [];
    for await (const token of sequence.evaluate(model.tokenize("a robot sees"), {temperature: 0})) {
      tokens.push(token);
      if (tokens.length === 8) break;
    }
    sequence.dispose();
    return tokens;
  };
}

const generate = await load(path);
const tokens = await generate();
if (flags.includes("--link-too")) {
  const link = fs.readlinkSync(path);
  assert.match(link, /^\/proc\/self\/fd\/\d+$/);
  assert.deepStrictEqual(await (await load(link))(), tokens);
}
console.log(JSON.stringify({tokens}));
if (flags.includes("--wait")) {
  for await (const _ of createInterface({input: process.stdin})) {
    console.log(JSON.stringify({tokens: await generate()}));
  }
}
process.exit(0);
