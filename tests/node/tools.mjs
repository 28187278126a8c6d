// The official Node client and streamed tool calls: what it puts together from the pieces, beside the whole
// answer to the same request. Takes a base URL, a model and the request as JSON; prints one JSON object.
import OpenAI from "openai";

const [baseURL, model, request] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const body = { model, ...JSON.parse(request) };

const whole = await client.chat.completions.create(body);
const runner = client.chat.completions.stream(body);
let pieces = 0;
for await (const chunk of runner) pieces += chunk.choices[0]?.delta?.tool_calls?.length ?? 0;
const final = await runner.finalChatCompletion();
const told = (completion) => ({
  finish: completion.choices[0].finish_reason,
  content: completion.choices[0].message.content,
  calls: (completion.choices[0].message.tool_calls ?? []).map((call) => call.function),
});
console.log(JSON.stringify({ whole: told(whole), streamed: told(final), pieces }));
