// The Vercel AI SDK with default settings. With @ai-sdk/openai `store` is on, so answers are repeated as references.
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { drive, found, NAMES } from "./soak_common.mjs";

const provider = process.env.SOAK_API === "messages" ? "anthropic" : "openai";
const model = (await import(`@ai-sdk/${provider}`))[provider](process.env.SOAK_MODEL);
const instructions = "You are a careful engineer. Use the tools.";

const tools = Object.fromEntries(
  NAMES.map((name) => [
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

await drive(async (question, part) => {
  history.push({ role: "user", content: question });
  const [text, messages] = await turn(history, part);
  history.push(...messages);
  return text;
});
