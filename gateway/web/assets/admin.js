// The administration page: keys, usage, replicas and alerts.

import { render as mount } from 'preact'
import { useEffect, useRef, useState } from './vendor/hooks.js'
import { call, json } from './api.js'
import { Login, applyTheme, copy, html, number, stored } from './common.js'
import { StackedDays } from './plot.js'

const ADMIN = '/api/admin'
const PAGES = { keys: ['Keys', Keys], usage: ['Usage', Usage], replicas: ['Replicas', Replicas], alerts: ['Alerts', Alerts] }
const SCOPES = ['inference', 'usage', 'metrics', 'admin']
/** Milliseconds between two looks at replicas and alerts. */
const REFRESH = 5000
const DAY = 86_400_000
const money = (usd) => `$${usd.toLocaleString('en', { maximumFractionDigits: usd < 1 ? 4 : 2 })}`
const short = new Intl.NumberFormat('en', { notation: 'compact', maximumFractionDigits: 1 })
const day = (time) => new Date(time).toISOString().slice(0, 10)
const when = (text) => (text ? text.slice(0, 16).replace('T', ' ') : '–')
const query = (values) => new URLSearchParams(Object.entries(values).flatMap(([name, value]) => [value].flat().filter(Boolean).map((one) => [name, one])))

function App() {
  const [session, setSession] = useState(null)
  const [problem, setProblem] = useState(null)
  const [page, setPage] = useState(pageInAddress())
  const enter = async () => {
    try {
      const session = await json('GET', '/api/session')
      if (session.administered) setSession(session)
      else setProblem('This gateway has no store, so there are no keys, tenants or usage to administer. Start it with --store sqlite:///llmops.db, or with the URL of a PostgreSQL database.')
    } catch (error) {
      if (error.status === 401) setSession({})
      else setProblem(error.message)
    }
  }
  useEffect(() => {
    applyTheme(stored('llmops-options', {}).theme)
    enter()
    const moved = () => setPage(pageInAddress())
    addEventListener('hashchange', moved)
    return () => removeEventListener('hashchange', moved)
  }, [])
  if (problem) return html`<p class="starting" role="alert">${problem}</p>`
  if (!session) return html`<p class="starting" role="status">Loading …</p>`
  if (!session.admin) {
    const note = session.signed_in ? 'This key lacks the scope admin.' : 'Administration needs a key with the scope admin, also on this machine: llmops key create --scopes admin'
    return html`<${Login} title="Administration" note=${note} onDone=${enter} />`
  }
  const [, Page] = PAGES[page]
  return html`<div class="admin">
    <header class="bar"><h1>Administration</h1>
      <nav aria-label="Pages">${Object.entries(PAGES).map(([name, [title]]) => html`<a href=${`#${name}`} aria-current=${name === page ? 'page' : null}>${title}</a>`)}</nav>
      <a href="/">Chat</a><button onClick=${async () => { await call('DELETE', '/api/session'); setSession({}) }}>Sign out</button></header>
    <main key=${page}><${Page} /></main>
  </div>`
}

function pageInAddress() {
  const name = location.hash.slice(1)
  return name in PAGES ? name : 'keys'
}

/** Read `path`, again every `every` milliseconds, and return [data, problem, reload]. */
function useData(path, every = 0) {
  const [state, setState] = useState([null, null])
  const latest = useRef(path)
  latest.current = path
  const load = async () => {
    try {
      const data = await json('GET', path)
      if (latest.current === path) setState([data, null])
    } catch (error) {
      if (latest.current === path) setState(([data]) => [data, error.message])
    }
  }
  useEffect(() => {
    load()
    const timer = every && setInterval(() => document.hidden || load(), every)
    return () => clearInterval(timer)
  }, [path])
  return [...state, load]
}

const Problem = ({ text }) => text && html`<p class="notice" role="alert">${text}</p>`

function Table({ caption, head, rows, empty }) {
  if (!rows.length) return html`<p class="soft">${empty}</p>`
  return html`<div class="wide" tabindex="0" role="region" aria-label=${caption}><table><caption class="hidden">${caption}</caption>
    <thead><tr>${head.map((one) => html`<th scope="col">${one}</th>`)}</tr></thead>
    <tbody>${rows.map((cells) => html`<tr>${cells.map((cell, at) => (at ? html`<td>${cell}</td>` : html`<th scope="row">${cell}</th>`))}</tr>`)}</tbody></table></div>`
}

// -- keys

function Keys() {
  const [all, setAll] = useState(false)
  const [keys, problem, reload] = useData(`${ADMIN}/keys?${query({ all: all && 'true' })}`)
  const [tenants, , reloadTenants] = useData(`${ADMIN}/tenants`)
  const [secret, setSecret] = useState(null)
  const [failure, setFailure] = useState(null)
  const [making, setMaking] = useState(false)
  const act = async (method, path, body) => {
    setFailure(null)
    try {
      const done = await json(method, path, body)
      if (done.key) setSecret(done)
      await reload()
      return true
    } catch (error) {
      setFailure(error.message)
      return false
    }
  }
  const revoke = (key) => confirm(`Revoke ${key.id} of ${key.user}? This cannot be undone.`) && act('POST', `${ADMIN}/keys/${key.id}/revoke`, {})
  const rotate = (key) => confirm(`Give ${key.id} another secret? The present one works for another day.`) && act('POST', `${ADMIN}/keys/${key.id}/rotate`, {})
  const create = async (fields) => {
    const { tenant } = fields
    if (!(tenants ?? []).some((one) => one.id === tenant) && !(await act('POST', `${ADMIN}/tenants`, { id: tenant }))) return
    if (await act('POST', `${ADMIN}/keys`, fields)) { setMaking(false); reloadTenants() }
  }
  return html`<div class="head"><h2>Keys</h2>
      <label class="check"><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} /> also refused ones</label>
      <button class="primary" aria-expanded=${making} onClick=${() => setMaking(!making)}>New key</button></div>
    <${Problem} text=${problem ?? failure} />
    ${secret && html`<div class="notice" role="status"><p>The secret of ${secret.id}, shown this once:</p><code>${secret.key}</code>
      <button onClick=${(event) => copy(secret.key, event.target)}>Copy</button> <button onClick=${() => setSecret(null)}>Done</button></div>`}
    ${making && html`<${NewKey} tenants=${tenants ?? []} onCreate=${create} />`}
    ${keys && html`<${Table} caption="Keys" empty="There are no keys." head=${['Key', 'Tenant', 'User', 'Scopes', 'Models', 'Limits', 'Expires', 'State', '']}
      rows=${keys.map((key) => [html`${key.name ?? key.id}<br /><small>${key.prefix}…</small>`, key.tenant, key.user, key.scopes.join(', '), key.models?.join(', ') ?? 'all',
        limits(key), when(key.expires_at), key.state, key.state === 'active' && html`<span class="actions">
          <button class="plain" aria-label=${`Rotate ${key.name ?? key.id}`} onClick=${() => rotate(key)}>Rotate</button>
          <button class="plain" aria-label=${`Revoke ${key.name ?? key.id}`} onClick=${() => revoke(key)}>Revoke</button></span>`])} />`}`
}

function limits({ rpm, tpm, concurrent, budget }) {
  const parts = [rpm && `${number.format(rpm)} requests/min`, tpm && `${number.format(tpm)} tokens/min`, concurrent && `${concurrent} at once`,
    budget && `${money(Number(budget.usd))} a ${budget.period}`]
  return parts.filter(Boolean).join(', ') || '–'
}

function NewKey({ tenants, onCreate }) {
  const submit = (event) => {
    event.preventDefault()
    const form = new FormData(event.target)
    const text = (name) => form.get(name).trim() || null
    const count = (name) => (text(name) === null ? null : Number(text(name)))
    const fields = { tenant: text('tenant'), user: text('user'), name: text('name'), scopes: form.getAll('scopes'), rpm: count('rpm'), tpm: count('tpm'),
      models: text('models')?.split(/[\s,]+/).filter(Boolean) ?? null, expires_at: text('expires') && `${text('expires')}T00:00:00Z`,
      budget: text('usd') && { usd: text('usd'), period: form.get('period') } }
    onCreate(Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null)))
  }
  return html`<form class="fields" onSubmit=${submit} aria-label="New key">
    <label>Tenant <input name="tenant" list="tenants" required autofocus /></label><datalist id="tenants">${tenants.map((one) => html`<option value=${one.id} />`)}</datalist>
    <label>User, e-mail <input name="user" type="email" required /></label>
    <label>Name <input name="name" /></label>
    <label>Models <input name="models" placeholder="all" /></label>
    <label>Requests a minute <input name="rpm" type="number" min="1" /></label>
    <label>Tokens a minute <input name="tpm" type="number" min="1" /></label>
    <label>Budget, $ <input name="usd" type="number" min="0" step="any" /></label>
    <label>per <select name="period"><option>month</option><option>week</option><option>day</option></select></label>
    <label>Expires <input name="expires" type="date" /></label>
    <fieldset><legend>Scopes</legend>${SCOPES.map((one) => html`<label class="check"><input type="checkbox" name="scopes" value=${one} defaultChecked=${one === 'inference'} /> ${one}</label>`)}</fieldset>
    <button class="primary">Create</button></form>`
}

// -- usage

const GROUPS = { model: 'model', tenant: 'tenant', user: 'user', key: 'key' }

function Usage() {
  const [first, setFirst] = useState(day(Date.now() - 29 * DAY))
  const [last, setLast] = useState(day(Date.now()))
  const [by, setBy] = useState('model')
  const [tenant, setTenant] = useState('')
  const range = { from: first, to: last, tenant: tenant.trim() }
  const [report, problem] = useData(`${ADMIN}/usage?${query({ ...range, by: ['day', by] })}`)
  const [tenants] = useData(`${ADMIN}/tenants?all=true`)
  const sums = new Map()
  const cells = new Map()
  for (const line of report?.lines ?? []) {
    const name = line[by]
    cells.set(`${line.day} ${name}`, line)
    const sum = sums.get(name) ?? { requests: 0, input_tokens: 0, cached_tokens: 0, output_tokens: 0, cost_usd: 0 }
    for (const field of Object.keys(sum)) sum[field] += line[field]
    sums.set(name, sum)
  }
  const groups = [...sums.keys()].sort((a, b) => sums.get(b).cost_usd - sums.get(a).cost_usd || sums.get(b).output_tokens - sums.get(a).output_tokens)
  const days = Array.from({ length: Math.min(Math.max(Math.round((Date.parse(last) - Date.parse(first)) / DAY) + 1, 1), 400) }, (_, at) => day(Date.parse(first) + at * DAY))
  const plot = (title, field, format) => html`<${StackedDays} title=${title} days=${days} groups=${groups} format=${format}
    value=${(one, name) => { const line = cells.get(`${one} ${name}`); return line ? [field].flat().reduce((sum, part) => sum + line[part], 0) : 0 }} />`
  return html`<div class="head"><h2>Usage</h2>
      <label>from <input type="date" value=${first} max=${last} onChange=${(event) => event.target.value && setFirst(event.target.value)} /></label>
      <label>to <input type="date" value=${last} min=${first} onChange=${(event) => event.target.value && setLast(event.target.value)} /></label>
      <label>by <select value=${by} onChange=${(event) => setBy(event.target.value)}>${Object.keys(GROUPS).map((one) => html`<option>${one}</option>`)}</select></label>
      <label>tenant <select value=${tenant} onChange=${(event) => setTenant(event.target.value)}><option value="">all</option>${(tenants ?? []).map((one) => html`<option>${one.id}</option>`)}</select></label></div>
    <${Problem} text=${problem} />
    ${report && html`<div class="plots">${plot('Cost', 'cost_usd', money)}${plot('Tokens', ['input_tokens', 'output_tokens'], (value) => short.format(value))}</div>
      <${Table} caption=${`Usage by ${by}`} empty="There is no usage in these days." head=${[by, 'requests', 'prompt tokens', 'of them cached', 'answer tokens', 'cost']}
        rows=${groups.map((name) => { const one = sums.get(name); return [name, ...[one.requests, one.input_tokens, one.cached_tokens, one.output_tokens].map((value) => number.format(value)), money(one.cost_usd)] })} />`}`
}

// -- replicas and alerts

function Replicas() {
  const [state, problem] = useData(`${ADMIN}/replicas`, REFRESH)
  const used = ({ kv_blocks: blocks, kv_blocks_free: free }) => (blocks && free != null ? `${Math.round(100 * (1 - free / blocks))} %` : '–')
  const rows = (state?.gateways ?? []).flatMap(({ models }) => Object.entries(models).flatMap(([model, replicas]) => replicas.map((one) => [one.replica, model,
    one.problem ? `${one.state}: ${one.problem}` : one.state, one.running ?? '–', one.waiting ?? '–', used(one), one.step_ms ? `${one.step_ms} ms` : '–',
    one.last_update_seconds_ago == null ? '–' : `${one.last_update_seconds_ago.toFixed(1)} s ago`])))
  return html`<div class="head"><h2>Models and replicas</h2></div><${Problem} text=${problem} />
    ${state && html`<${Table} caption="Models" empty="No model is served." head=${['Model', 'State', 'Target', 'Context']}
      rows=${state.models.map((one) => [one.id, one.ready ? 'ready' : one.problem ?? 'not ready', one.alias_of ? `alias of ${one.alias_of.join(', ')}` : one.target ?? '–', one.max_model_len ? number.format(one.max_model_len) : '–'])} />
    <h3>Replicas</h3><${Table} caption="Replicas" empty="This gateway has one server; replicas are listed with the setting replicas."
      head=${['Replica', 'Model', 'State', 'Running', 'Waiting', 'KV cache', 'Step', 'Last update']} rows=${rows} />`}`
}

function Alerts() {
  const [alerts, problem] = useData(`${ADMIN}/alerts`, REFRESH)
  return html`<div class="head"><h2>Alerts</h2></div><${Problem} text=${problem} />
    ${alerts && !alerts.configured && html`<p>The setting <code>web.prometheus</code> names the Prometheus whose alerts are shown here.</p>`}
    ${alerts?.configured && html`<${Table} caption="Alerts" empty="No alert is pending or firing." head=${['Alert', 'State', 'Priority', 'What', 'Since']}
      rows=${alerts.data.map((one) => [one.runbook ? html`<a href=${one.runbook} rel="noopener noreferrer" target="_blank">${one.name}</a>` : one.name,
        html`<span class=${`state ${one.state}`}>${one.state}</span>`, one.priority || '–', one.summary, when(one.since)])} />`}`
}

mount(html`<${App} />`, document.getElementById('app'))
