// LangChain for JavaScript: `ChatOpenAI` with default settings, which uses chat completions.
import { HumanMessage, SystemMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

import { drive, found, NAMES } from "./soak_common.mjs";

const tools = NAMES.map((name) =>
  tool(async ({ target }) => found(name, target), {
    name,
    description: `${name} a file.`,
    schema: z.object({ target: z.string() }),
  }),
);
const configuration = { baseURL: process.env.OPENAI_BASE_URL };
const model = new ChatOpenAI({ model: process.env.SOAK_MODEL, maxRetries: 0, configuration }).bindTools(tools);
const history = [new SystemMessage("You are a careful engineer. Use the tools.")];

async function streamed() {
  let whole;
  for await (const chunk of await model.stream(history)) whole = whole ? whole.concat(chunk) : chunk;
  return whole;
}

await drive(async (question, part) => {
  history.push(new HumanMessage(question));
  for (;;) {
    const answer = part % 2 ? await model.invoke(history) : await streamed();
    history.push(answer);
    if (!answer.tool_calls?.length) return answer.text;
    for (const call of answer.tool_calls) {
      history.push(await tools.find(({ name }) => name === call.name).invoke(call));
    }
  }
});
