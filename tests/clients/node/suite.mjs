// Runs the Node clients against a gateway: node suite.mjs BASE_URL MODEL ENCODER. Prints {check: "ok" | what went wrong}.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { Output, cosineSimilarity, embedMany, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const [baseURL, model, encoder, only] = process.argv.slice(2);
const settings = { baseURL, apiKey: "test", maxRetries: 0 };
const client = new OpenAI(settings);
const providers = {
  responses: createOpenAI(settings)(model),
  chat: createOpenAI(settings).chat(model),
  compatible: createOpenAICompatible({ ...settings, name: "llmops", supportsStructuredOutputs: true })(model),
};
const question = "What is the capital of France?";
const city = z.object({ city: z.string().max(20), capital: z.boolean() });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "get_weather", description: "Weather of a city", parameters } };
const checks = {};

checks["openai chat"] = async () => {
  const answer = await client.chat.completions.create({
    model, messages: [{ role: "user", content: question }], max_tokens: 12, temperature: 0,
  });
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
};

checks["openai stream"] = async () => {
  const stream = client.chat.completions.stream({
    model, messages: [{ role: "user", content: question }], max_tokens: 12, temperature: 0,
  });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.match(text, /Paris/);
};

checks["openai streamed tool call"] = async () => {
  const stream = client.chat.completions.stream({
    model, messages: [{ role: "user", content: "Weather in Paris?" }], max_tokens: 60, temperature: 0,
    tools: [weather], tool_choice: "required",
  });
  const call = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
  assert.equal(call.function.name, "get_weather");
  assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
};

checks["openai structured output"] = async () => {
  const answer = await client.chat.completions.parse({
    model, messages: [{ role: "user", content: question }], max_tokens: 60, temperature: 0,
    response_format: zodResponseFormat(city, "city"),
  });
  city.parse(answer.choices[0].message.parsed);
};

checks["openai responses"] = async () => {
  const whole = await client.responses.create({ model, input: question, max_output_tokens: 12, temperature: 0 });
  assert.match(whole.output_text, /Paris/);
  const stream = client.responses.stream({ model, input: question, max_output_tokens: 12, temperature: 0 });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  assert.equal((await stream.finalResponse()).output_text, text);
  assert.equal(text, whole.output_text);
};

checks["openai background"] = async () => {
  const stream = await client.responses.create({
    model, input: question, max_output_tokens: 12, temperature: 0, background: true, stream: true,
  });
  const seen = [];
  for await (const event of stream) if (seen.push(event) === 4) break;
  const id = seen[0].response.id;
  for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: 3 })) seen.push(event);
  assert.deepEqual(seen.map((event) => event.sequence_number), [...seen.keys()]);
  assert.equal(seen.at(-1).response.output_text ?? seen.at(-1).response.output[0].content[0].text,
    (await client.responses.retrieve(id)).output_text);
};

checks["openai embeddings"] = async () => {
  const { data } = await client.embeddings.create({ model: encoder, input: ["capital of France", "Paris", "a recipe for soup"] });
  const [query, near, far] = data.map((entry) => entry.embedding);
  assert.ok(cosineSimilarity(query, near) > cosineSimilarity(query, far) + 0.1);
};

const encoders = { "ai embed": createOpenAI(settings).embedding(encoder) };
encoders["ai compatible embed"] = createOpenAICompatible({ ...settings, name: "llmops" }).embeddingModel(encoder);
for (const [name, encoderModel] of Object.entries(encoders)) {
  checks[name] = async () => {
    const { embeddings } = await embedMany({ model: encoderModel, values: ["capital of France", "Paris", "a recipe for soup"] });
    const [query, near, far] = embeddings;
    assert.ok(cosineSimilarity(query, near) > cosineSimilarity(query, far) + 0.1);
  };
}

for (const name of ["responses", "compatible"]) {
  checks[`ai ${name} streamObject`] = async () => {
    const result = streamObject({ model: providers[name], prompt: question, schema: city, temperature: 0, maxOutputTokens: 60 });
    for await (const _ of result.partialObjectStream);
    city.parse(await result.object);
  };
}

checks["openai abort"] = async () => {
  const stream = await client.chat.completions.create({
    model, messages: [{ role: "user", content: "Tell a long story." }], max_tokens: 2000, stream: true, ignore_eos: true,
  });
  for await (const _ of stream) break;
  stream.controller.abort();
};

for (const [name, llm] of Object.entries(providers)) {
  checks[`ai ${name} generateText`] = async () => {
    const { text, usage, finishReason } = await generateText({ model: llm, prompt: question, maxOutputTokens: 12, temperature: 0 });
    assert.match(text, /Paris/);
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
    assert.ok(["stop", "length"].includes(finishReason), finishReason);
  };

  checks[`ai ${name} streamText`] = async () => {
    const result = streamText({
      model: llm, prompt: question, maxOutputTokens: 12, temperature: 0, onError: ({ error }) => { throw error; },
    });
    let text = "";
    for await (const delta of result.textStream) text += delta;
    assert.match(text, /Paris/);
    assert.equal(await result.text, text);
  };

  checks[`ai ${name} tools`] = async () => {
    const calls = [];
    const get_weather = tool({
      description: "Weather of a city",
      inputSchema: jsonSchema(parameters),
      execute: async (input) => { calls.push(input); return "sunny"; },
    });
    const options = { model: llm, prompt: "Weather in Paris?", tools: { get_weather }, temperature: 0, maxOutputTokens: 60 };
    const once = await generateText({ ...options, toolChoice: "required" });
    assert.equal(calls.length, once.toolCalls.length);
    assert.equal(typeof calls[0].city, "string");
    // the call and its result go back to the model with the next turn
    const next = await generateText({
      model: llm, tools: { get_weather }, toolChoice: "none", temperature: 0, maxOutputTokens: 12,
      messages: [{ role: "user", content: "Weather in Paris?" }, ...once.response.messages], stopWhen: stepCountIs(1),
    });
    assert.ok(next.text.length > 0);
  };

  checks[`ai ${name} streamed tool call`] = async () => {
    const get_weather = tool({ description: "Weather of a city", inputSchema: jsonSchema(parameters) });
    const result = streamText({
      model: llm, prompt: "Weather in Paris?", tools: { get_weather }, temperature: 0, maxOutputTokens: 60,
      toolChoice: { type: "tool", toolName: "get_weather" }, onError: ({ error }) => { throw error; },
    });
    await result.consumeStream();
    assert.equal((await result.toolCalls)[0].toolName, "get_weather");
    assert.equal(typeof (await result.toolCalls)[0].input.city, "string");
  };

  checks[`ai ${name} structured output`] = async () => {
    const { output } = await generateText({
      model: llm, prompt: question, output: Output.object({ schema: city }), temperature: 0, maxOutputTokens: 60,
    });
    city.parse(output);
  };

  checks[`ai ${name} abort`] = async () => {
    const abort = new AbortController();
    const result = streamText({
      model: llm, prompt: "Tell a long story.", maxOutputTokens: 2000, abortSignal: abort.signal, onError: () => {},
    });
    for await (const _ of result.textStream) { abort.abort(); break; }
  };
}

const outcome = {};
for (const [name, check] of Object.entries(checks)) {
  if (only && !name.includes(only)) continue;
  try {
    await check();
    outcome[name] = "ok";
  } catch (error) {
    outcome[name] = String(error?.stack ?? error).slice(0, 2000);
  }
}
console.log(JSON.stringify(outcome));
