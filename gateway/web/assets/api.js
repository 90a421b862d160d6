// Requests to the gateway, and its event streams. This module does not depend on the page.

/** An answer of the gateway that is not a success. */
export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `The gateway answered with status ${status}.`)
    this.status = status
    this.code = body?.error?.code ?? null
  }
}

export async function call(method, path, body, headers = {}) {
  const options = { method, headers: { ...headers } }
  if (body !== undefined) {
    options.headers['content-type'] = 'application/json'
    options.body = JSON.stringify(body)
  }
  const response = await fetch(path, options)
  if (!response.ok) throw new ApiError(response.status, await response.json().catch(() => null))
  return response
}

export const json = async (...args) => (await call(...args)).json()

/** Yield {id, data} for each event of a response, in constant work per event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  let id = null
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      const lines = (rest + value).split('\n')
      rest = lines.pop()
      for (const line of lines) {
        if (line.startsWith('id: ')) id = line.slice(4)
        else if (line.startsWith('data: {')) yield { id, data: JSON.parse(line.slice(6)) }
        else if (line === 'data: [DONE]') return
      }
    }
  } finally {
    reader.cancel().catch(() => {})
  }
}

const RUNS = '/api/chat/completions'
const wait = (ms) => new Promise((done) => setTimeout(done, ms))

/**
 * Yield the chunks of an answer. A connection that breaks is opened again after the last event that came.
 *
 * @param open Returns the response that begins the stream; null to read a run from its beginning.
 * @param run The id of the run, if it is known.
 */
export async function* answer(open, run = null) {
  let last = null
  let response = open ? await open() : null
  for (let failures = 0; ; ) {
    try {
      response ??= await call('GET', `${RUNS}/${run}`, undefined, last ? { 'last-event-id': last } : {})
      for await (const { id, data } of events(response)) {
        failures = 0
        last = id ?? last
        run ??= data.id
        yield data
        if (data.status || data.error) return
      }
    } catch (error) {
      // Retry after a 5xx: the gateway or its balancer is starting, or another gateway takes over.
      if (!run || (error instanceof ApiError && error.status < 500)) throw error
    }
    // The stream ended without its last event, so the connection broke.
    if (!run || ++failures > 6) throw new Error('The connection to the gateway is lost. Reload the page when the gateway is back.')
    response = null
    await wait(Math.min(250 * 2 ** failures, 8000) * (0.8 + 0.4 * Math.random()))
  }
}

export const stop = (run) => json('DELETE', `${RUNS}/${run}`)
