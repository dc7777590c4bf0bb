// The Vercel AI SDK with @ai-sdk/openai and default settings: `store` is on, so answers are repeated as references.
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const turns = Number(process.env.SOAK_TURNS);
const model = openai(process.env.SOAK_MODEL);
const instructions = "You are a careful engineer. Use the tools.";

function found(name, target) {
  const lines = 25 + ((target.length * 37 + name.length * 11 + Number(target.replace(/\D/g, ""))) % 75);
  return Array.from({ length: lines }, (_, n) => `${target}:${n} value of ${name} = ${(n * 7919) % 10007}`).join("\n");
}

const tools = Object.fromEntries(
  ["read", "search", "run"].map((name) => [
    name,
    tool({
      description: `${name} a file.`,
      inputSchema: z.object({ target: z.string() }),
      execute: async ({ target }) => found(name, target),
    }),
  ]),
);

async function turn(messages, part) {
  const asked = { model, tools, messages, system: instructions, stopWhen: stepCountIs(10), maxRetries: 0 };
  if (part % 2) {
    const result = await generateText(asked);
    return [result.text, result.responseMessages ?? result.response.messages];
  }
  let failure;
  const result = streamText({ ...asked, onError: ({ error }) => (failure = error) });
  const text = await result.text;
  if (failure) throw failure;
  return [text, (await result.responseMessages) ?? (await result.response).messages];
}

const history = [];
let errors = 0;
for (let part = 1; part <= turns && errors < 3; part += 1) {
  history.push({ role: "user", content: `Part ${part} please; the ticket is PART-${1000 + part}.` });
  let error = null;
  try {
    const [text, messages] = await turn(history, part);
    history.push(...messages);
    if (!text.includes(`Done with part ${part}:`)) error = `wrong answer: ${text.slice(0, 200)}`;
  } catch (thrown) {
    console.error(thrown);
    error = `${thrown.name}: ${thrown.message}`.slice(0, 500);
  }
  errors += error ? 1 : 0;
  console.log(JSON.stringify({ turn: part, error }));
}
process.exitCode = errors ? 1 : 0;
