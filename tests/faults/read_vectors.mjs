// Reads published vectors with nothing but a socket: what a service in another language sees.
// node read_vectors.mjs PORT USER ITEM...   prints {dim, user: [bits...], items: [[bits...]...], scores: [...]}
import net from "node:net";

const [port, user, ...items] = process.argv.slice(2);

function command(...words) {
  const parts = words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`);
  return `*${words.length}\r\n${parts.join("")}`;
}

// One reply from `bytes` at `at`: [value, next], or null while it is not whole.
function reply(bytes, at) {
  const end = bytes.indexOf("\r\n", at);
  if (end < 0) return null;
  const [kind, text] = [String.fromCharCode(bytes[at]), bytes.toString("latin1", at + 1, end)];
  if (kind === "-") throw new Error(text);
  if (kind === "$") {
    if (text === "-1") return [null, end + 2];
    const next = end + 4 + Number(text);
    return next <= bytes.length ? [bytes.subarray(end + 2, next - 2), next] : null;
  }
  if (kind === "*") {
    const values = [];
    let next = end + 2;
    for (let n = 0; n < Number(text); n++) {
      const one = reply(bytes, next);
      if (one === null) return null;
      values.push(one[0]);
      next = one[1];
    }
    return [values, next];
  }
  return [text, end + 2];
}

function ask(commands) {
  return new Promise((resolve, reject) => {
    const socket = net.connect(Number(port), "127.0.0.1", () => socket.write(commands.join("")));
    let bytes = Buffer.alloc(0);
    socket.on("error", reject);
    socket.on("data", (data) => {
      bytes = Buffer.concat([bytes, data]);
      const values = [];
      let at = 0;
      for (let one; values.length < commands.length && at < bytes.length && (one = reply(bytes, at)); at = one[1]) {
        values.push(one[0]);
      }
      if (values.length === commands.length) {
        socket.end();
        resolve(values);
      }
    });
  });
}

const [meta, mine, ...theirs] = await ask([
  command("HMGET", "rec:meta", "dim", "dtype", "metric"),
  command("HGET", `rec:user:${user}`, "vector"),
  ...items.map((item) => command("HGET", `rec:item:${item}`, "vector")),
]);
const dim = Number(meta[0]);

function floats(bytes) {
  if (bytes.length !== 4 * dim) throw new Error(`${bytes.length} bytes, not ${4 * dim}`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return Array.from({ length: dim }, (_, n) => view.getFloat32(4 * n, true));
}

function bits(values) {
  const view = new DataView(new ArrayBuffer(4));
  return values.map((value) => (view.setFloat32(0, value), view.getUint32(0)));
}

const vector = floats(mine);
const others = theirs.map(floats);
const scores = others.map((other) => other.reduce((sum, value, n) => sum + value * vector[n], 0));
const told = { dim, dtype: `${meta[1]}`, metric: `${meta[2]}`, user: bits(vector), items: others.map(bits), scores };
console.log(JSON.stringify(told));
