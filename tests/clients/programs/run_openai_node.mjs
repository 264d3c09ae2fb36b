// The official client for JavaScript.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { expectRunning, key, manyTokens, messages, model, url } from "./naiad_server.mjs";

const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });

async function textOf(stream, read) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices.length ? (read(chunk.choices[0]) ?? "") : "";
  return text;
}

async function chat() {
  const asked = { model, messages, max_tokens: 16, seed: 3 };
  const { data: answer, response, request_id } = await client.chat.completions.create(asked).withResponse();
  assert.equal(response.status, 200);
  assert(request_id);
  const text = answer.choices[0].message.content;
  assert(text);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  const streamed = await client.chat.completions.create({ ...asked, stream: true });
  assert.equal(await textOf(streamed, (choice) => choice.delta.content), text);
  const helper = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const final = await helper.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.equal(final.choices[0].finish_reason, answer.choices[0].finish_reason);
  assert.equal(final.usage.total_tokens, answer.usage.total_tokens);
}

async function completions() {
  const asked = { model, prompt: "Once upon a time", max_tokens: 8, seed: 3, logprobs: 2 };
  const { choices } = await client.completions.create(asked);
  assert.equal(choices[0].logprobs.tokens.join(""), choices[0].text);
  const streamed = await client.completions.create({ ...asked, stream: true });
  assert.equal(await textOf(streamed, (choice) => choice.text), choices[0].text);
}

async function choicesAndLogProbs() {
  const asked = { model, messages, max_tokens: 8, n: 3, logprobs: true, top_logprobs: 4 };
  const { choices } = await client.chat.completions.create(asked);
  assert.deepEqual(choices.map((choice) => choice.index), [0, 1, 2]);
  for (const choice of choices)
    for (const token of choice.logprobs.content) assert.equal(token.top_logprobs.length, 4);
}

async function errors() {
  const names = (await client.models.list()).data.map((each) => each.id);
  assert.deepEqual(names, [model]);
  await assert.rejects(
    client.chat.completions.create({ model: "other", messages }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
  await assert.rejects(
    client.chat.completions.create({ model, messages, temprature: 1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temprature",
  );
}

async function cancellation() {
  const asked = { model, messages, max_tokens: manyTokens, ignore_eos: true };
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    assert(chunk.id);
    await expectRunning(1);
    break;
  }
  await expectRunning(0);
  const controller = new AbortController();
  const waiting = client.chat.completions.create(asked, { signal: controller.signal });
  const refused = assert.rejects(waiting, OpenAI.APIUserAbortError);
  await expectRunning(1);
  controller.abort();
  await refused;
  await expectRunning(0);
}

await chat();
await completions();
await choicesAndLogProbs();
await errors();
await cancellation();
