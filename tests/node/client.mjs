// The official Node client against a running gateway: plain and streamed chat, completions, the model
// list, an error and an abort. Prints one JSON object; the Python test reads it.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello to the world." }];
const options = { model, messages, max_tokens: 8, temperature: 0 };
const result = {};

const plain = await client.chat.completions.create(options);
result.plain = plain.choices[0].message.content;
result.usage = plain.usage;

let streamed = "";
let finish = null;
let usage = null;
const stream = await client.chat.completions.create({
  ...options, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
result.streamed = streamed;
result.finish = finish;
result.streamUsage = usage;

const completion = await client.completions.create({ model, prompt: "Once upon", max_tokens: 8, temperature: 0 });
result.completion = completion.choices[0].text;

result.models = [];
for await (const entry of client.models.list()) result.models.push(entry.id);

try {
  await client.chat.completions.create({ ...options, model: "no-such-model" });
} catch (error) {
  result.error = { name: error.constructor.name, status: error.status, code: error.code, message: error.message };
}

const long = await client.chat.completions.create({ ...options, stream: true, max_tokens: 400, ignore_eos: true });
let seen = 0;
for await (const chunk of long) {
  if (chunk.choices[0]?.delta?.content && ++seen === 3) long.controller.abort();
}
result.abortedAfter = seen;
console.log(JSON.stringify(result));
