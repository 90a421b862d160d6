// Components that the chat page and the administration page share.

import { h } from 'preact'
import { useState } from './vendor/hooks.js'
import htm from './vendor/htm.js'
import { call } from './api.js'

export const html = htm.bind(h)
export const number = new Intl.NumberFormat('en')
export const stored = (key, otherwise) => JSON.parse(localStorage.getItem(key) ?? 'null') ?? otherwise
export const keep = (key, value) => localStorage.setItem(key, JSON.stringify(value))

/** Show `light` or `dark` colours, or those of the system. */
export function applyTheme(theme) {
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme
  else delete document.documentElement.dataset.theme
}

export async function copy(text, button) {
  const before = button.textContent
  try { await navigator.clipboard.writeText(text); button.textContent = 'Copied' } catch { button.textContent = 'Not copied' }
  setTimeout(() => { button.textContent = before }, 1500)
}

/** The form that turns a key into the page's cookie. */
export function Login({ title, note, onDone }) {
  const [problem, setProblem] = useState(null)
  const submit = async (event) => {
    event.preventDefault()
    try {
      const key = new FormData(event.target).get('key').trim()
      await call('POST', '/api/session', undefined, { authorization: `Bearer ${key}` })
      setProblem(null)
      onDone()
    } catch (error) {
      setProblem(error.message)
    }
  }
  return html`<main class="login"><h1>${title}</h1><form onSubmit=${submit}>
    ${note && html`<p class="notice">${note}</p>`}
    <label>API key <input name="key" type="password" autocomplete="current-password" required autofocus /></label>
    ${problem && html`<p class="notice" role="alert">${problem}</p>`}
    <button class="primary">Sign in</button>
    <small>The key stays in a cookie of this browser until you close it or sign out; no script can read it.</small>
  </form></main>`
}
