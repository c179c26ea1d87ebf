// Opens a recipe in yaml-language-server as an editor does, and prints diagnostics and the text over one line.
//
//     node docs/editor_check.mjs SERVER RECIPE [LINE]
//
// SERVER is node_modules/yaml-language-server/bin/yaml-language-server. The answer of the server may take some seconds.
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [server, recipe, line = "1"] = process.argv.slice(2);
const uri = pathToFileURL(resolve(recipe)).href;
const child = spawn("node", [server, "--stdio"]);
const HOVER = 2;

function send(message) {
  const body = Buffer.from(JSON.stringify({ jsonrpc: "2.0", ...message }));
  child.stdin.write(`Content-Length: ${body.length}\r\n\r\n`);
  child.stdin.write(body);
}

function receive(message) {
  if (message.method === "workspace/configuration") {
    send({ id: message.id, result: message.params.items.map(() => null) });
  } else if (message.id !== undefined && message.method) {
    send({ id: message.id, result: null });
  } else if (message.id === 1) {
    // The store of public schemas is off, so that nothing is fetched.
    const settings = { yaml: { validate: true, hover: true, schemaStore: { enable: false } } };
    send({ method: "initialized", params: {} });
    send({ method: "workspace/didChangeConfiguration", params: { settings } });
    const textDocument = { uri, languageId: "yaml", version: 1, text: readFileSync(recipe, "utf8") };
    send({ method: "textDocument/didOpen", params: { textDocument } });
  } else if (message.method === "textDocument/publishDiagnostics") {
    const { diagnostics } = message.params;
    for (const found of diagnostics) console.log(`${found.range.start.line + 1}: ${found.message}`);
    if (!diagnostics.length) console.log("nothing is wrong");
    const position = { line: Number(line) - 1, character: 4 };
    send({ id: HOVER, method: "textDocument/hover", params: { textDocument: { uri }, position } });
  } else if (message.id === HOVER) {
    console.log(`over line ${line}: ${message.result?.contents?.value ?? "nothing"}`);
    finish(0);
  }
}

function finish(code) {
  child.kill();
  process.exit(code);
}

let buffer = Buffer.alloc(0);
child.stdout.on("data", (data) => {
  buffer = Buffer.concat([buffer, data]);
  for (;;) {
    const headEnd = buffer.indexOf("\r\n\r\n");
    if (headEnd < 0) return;
    const length = Number(/Content-Length: (\d+)/i.exec(buffer.subarray(0, headEnd).toString())[1]);
    const end = headEnd + 4 + length;
    if (buffer.length < end) return;
    const message = JSON.parse(buffer.subarray(headEnd + 4, end).toString());
    buffer = buffer.subarray(end);
    receive(message);
  }
});
setTimeout(() => {
  console.error("the server did not answer within 20 seconds");
  finish(1);
}, 20_000);
const capabilities = { textDocument: { publishDiagnostics: {}, hover: { contentFormat: ["plaintext"] } } };
send({ id: 1, method: "initialize", params: { processId: process.pid, rootUri: null, capabilities } });
