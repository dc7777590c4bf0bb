// The OpenAI Agents SDK for JavaScript, with default settings.
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

import { drive, found, NAMES } from "./soak_common.mjs";

setTracingDisabled(true);
const agent = new Agent({
  name: "engineer",
  instructions: "You are a careful engineer. Use the tools.",
  model: process.env.SOAK_MODEL,
  tools: NAMES.map((name) =>
    tool({
      name,
      description: `${name} a file.`,
      parameters: z.object({ target: z.string() }),
      execute: async ({ target }) => found(name, target),
    }),
  ),
});

let history = [];

await drive(async (question, part) => {
  const asked = [...history, { role: "user", content: question }];
  const result = await run(agent, asked, { stream: part % 2 === 0 });
  if (part % 2 === 0) await result.completed;
  history = result.history;
  return result.finalOutput;
});
