// Vercel's AI SDK with its provider for servers like OpenAI's.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import { expectRunning, key, manyTokens, messages, model, question, url } from "./naiad_server.mjs";

const naiad = createOpenAICompatible({ name: "naiad", baseURL: url, apiKey: key, includeUsage: true });
const endless = { maxOutputTokens: manyTokens, providerOptions: { naiad: { ignore_eos: true } } };

async function generates(asks, prompt) {
  const asked = { model: asks, maxOutputTokens: 16, seed: 3, maxRetries: 0, ...prompt };
  const answer = await generateText(asked);
  assert(answer.text);
  assert(["stop", "length"].includes(answer.finishReason));
  assert.equal(answer.usage.totalTokens, answer.usage.inputTokens + answer.usage.outputTokens);
  const stream = streamText(asked);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, answer.text);
  assert.equal(await stream.finishReason, answer.finishReason);
  assert.equal((await stream.usage).outputTokens, answer.usage.outputTokens);
}

async function errors() {
  const refusals = [
    [{ model: naiad("other") }, 404],
    [{ model: naiad(model), temperature: -2 }, 400],
  ];
  for (const [asked, status] of refusals)
    await assert.rejects(
      generateText({ messages, maxRetries: 0, ...asked }),
      (error) => APICallError.isInstance(error) && error.statusCode === status && error.data.error.param !== null,
    );
}

async function cancellation() {
  const controller = new AbortController();
  const stream = streamText({ model: naiad(model), prompt: question, abortSignal: controller.signal, ...endless });
  const reading = (async () => {
    for await (const part of stream.textStream) assert.equal(typeof part, "string");
  })();
  await expectRunning(1);
  controller.abort();
  await reading.catch((error) => assert.equal(error.name, "AbortError"));
  await expectRunning(0);
}

await generates(naiad(model), { system: "You are brief.", messages });
await generates(naiad.completionModel(model), { prompt: "Once upon a time" });
await errors();
await cancellation();
