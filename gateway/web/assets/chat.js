// The chat page: past chats at the side, one conversation in the middle.

import { render as mount } from 'preact'
import { useEffect, useMemo, useRef, useState } from './vendor/hooks.js'
import { ApiError, answer, call, json, stop } from './api.js'
import { Login, applyTheme, copy, html, keep, number, stored } from './common.js'
import { LiveText, render } from './markdown.js'

const CHATS = '/api/conversations'
/** Where a message is kept that has no answer yet, so that a reload gives it back. */
const UNANSWERED = 'llmops-unanswered'
/** Bytes of an attached file: a larger one would fill the context of most models. */
const LARGEST_FILE = 256 * 1024
const SAMPLING = { temperature: ['Temperature', 0, 2, 0.1], top_p: ['Top p', 0, 1, 0.05], max_tokens: ['Longest answer, tokens', 1, 131072, 1] }

const idInAddress = () => (/^#(conv_[0-9a-f]{32})$/.exec(location.hash) ?? [])[1] ?? null

function App() {
  const [session, setSession] = useState(null)
  const [problem, setProblem] = useState(null)
  const enter = async () => {
    try {
      setSession(await json('GET', '/api/session'))
    } catch (error) {
      if (error.status === 401) setSession({ needsKey: true })
      else setProblem(error.message)
    }
  }
  useEffect(() => { enter() }, [])
  if (problem) return html`<p class="starting" role="alert">${problem}</p>`
  if (!session) return html`<p class="starting" role="status">Loading …</p>`
  if (session.needsKey) return html`<${Login} title="Chat" onDone=${enter} />`
  return html`<${Chat} session=${session} onSignOut=${async () => { await call('DELETE', '/api/session'); enter() }} />`
}

function Chat({ session, onSignOut }) {
  const [models, setModels] = useState([])
  const [model, setModel] = useState('')
  const [chats, setChats] = useState({ data: [], has_more: false })
  const [search, setSearch] = useState('')
  const [current, setCurrent] = useState(null)
  const [live, setLive] = useState(null)
  const [notice, setNotice] = useState(null)
  const [drawer, setDrawer] = useState(false)
  const [side, setSide] = useState(false)
  const [options, setOptions] = useState(() => stored('llmops-options', { system_prompt: '', theme: 'auto' }))
  const [status, setStatus] = useState('')
  const [draft, setDraft] = useState('')
  const [replaces, setReplaces] = useState(null)
  const input = useRef(null)
  const opened = useRef(null)
  const searched = useRef('')
  const log = useRef(null)
  const settings = useRef(null)
  const atEnd = useRef(true)

  const say = (error) => setNotice(error.message)

  const list = async (text = search) => {
    searched.current = text
    try {
      const found = await json('GET', `${CHATS}?limit=100&q=${encodeURIComponent(text)}`)
      // A result for an earlier search text arrives too late and is ignored.
      if (searched.current === text) setChats(found)
    } catch (error) {
      if (error.code !== 'conversations_not_stored') say(error)
    }
  }
  const more = async () => {
    const after = chats.data[chats.data.length - 1].id
    const page = await json('GET', `${CHATS}?limit=100&q=${encodeURIComponent(search)}&after=${after}`)
    setChats({ data: [...chats.data, ...page.data], has_more: page.has_more })
  }

  /** Show a conversation, and read on if its last answer is being written. */
  const open = async (id) => {
    opened.current = id
    setSide(false); setLive(null); setNotice(null); setReplaces(null)
    if (!id) {
      history.replaceState(null, '', location.pathname)
      setCurrent(null)
      input.current?.focus()
      return
    }
    try {
      const found = await json('GET', `${CHATS}/${id}`)
      if (opened.current !== id) return
      history.replaceState(null, '', `#${id}`)
      atEnd.current = true
      setCurrent(found)
      if (found.model && models.some((one) => one.id === found.model)) setModel(found.model)
      const last = found.messages[found.messages.length - 1]
      const unanswered = JSON.parse(sessionStorage.getItem(UNANSWERED) ?? '{}')
      if (unanswered.id === id && !last?.run_id) setDraft(unanswered.text)
      sessionStorage.removeItem(UNANSWERED)
      if (last?.run_id) {
        setCurrent({ ...found, messages: found.messages.slice(0, -1) })
        await follow(id, null, last.run_id)
      }
    } catch (error) {
      if (error.status === 404) history.replaceState(null, '', location.pathname)
      if (opened.current === id) say(error)
    }
  }

  /** Read an answer to its end, then show what is stored. `begin` opens its stream; without it the run is read. */
  const follow = async (id, begin, run = null, prefix = '') => {
    const reading = { run, view: null, text: prefix, thinking: '', calls: [] }
    setLive(reading)
    setStatus('The answer is being written.')
    let end = null
    try {
      for await (const chunk of answer(begin, run)) {
        if (opened.current !== id) return
        if (chunk.error) throw new ApiError(500, chunk)
        if (!reading.run) { reading.run = chunk.id; sessionStorage.removeItem(UNANSWERED); list(); if (reading.stopped) stop(chunk.id).catch(say) }
        if (chunk.dropped_messages) setNotice(`${chunk.dropped_messages} older messages did not fit into the model's context.`)
        const delta = chunk.choices?.[0]?.delta ?? {}
        if (delta.content) { reading.text += delta.content; reading.view?.write(delta.content) }
        if (delta.reasoning_content) { reading.thinking += delta.reasoning_content; reading.onThinking?.(delta.reasoning_content) }
        for (const part of delta.tool_calls ?? []) {
          const call = (reading.calls[part.index] ??= { name: part.function.name, text: '' })
          call.text += part.function.arguments
          reading.onCall?.(part.index, part.function.arguments)
        }
        if (chunk.status) end = chunk
      }
    } catch (error) {
      if (opened.current === id) say(error)
    }
    if (opened.current !== id) return
    await settle(id, reading, end)
  }

  const settle = async (id, reading, end) => {
    const calls = reading.calls.map(({ name, text }) => ({ function: { name, arguments: text } }))
    const unsaved = { id: null, role: 'assistant', content: reading.text, reasoning_content: reading.thinking, model: end?.served_by ?? model, tool_calls: calls, siblings: [],
      usage: end?.usage ?? {}, cost_usd: end?.cost_usd ?? null, status: end?.status ?? 'incomplete', finish_reason: end?.choices[0].finish_reason }
    let shown = unsaved
    try {
      const found = id ? await json('GET', `${CHATS}/${id}`) : null
      if (opened.current !== id) return
      shown = found?.messages.at(-1) ?? unsaved
      setCurrent((now) => found ?? { ...now, messages: [...now.messages, unsaved] })
      if (end && id && !end.saved) throw new Error('This answer was not saved, because the store of conversations cannot be reached. Copy it to keep it.')
    } catch (error) {
      setCurrent((now) => ({ ...now, messages: [...now.messages.filter((one) => one.id), unsaved] }))
      say(error)
    }
    setLive(null)
    const outcome = shown.status === 'incomplete' ? cutOf(shown) : 'The answer is complete.'
    setStatus(`${outcome.slice(0, -1)}, ${reading.text.match(/\S+/g)?.length ?? 0} words.`)
    list()
  }

  /** Send `text` behind the message `after`; without text, answer that message again or go on with it. */
  const send = async (text, { after, continues = false } = {}) => {
    setNotice(null)
    let conversation = current
    if (!conversation) {
      try {
        conversation = { ...(await json('POST', CHATS, { system_prompt: options.system_prompt || null })), messages: [] }
      } catch (error) {
        if (error.code !== 'conversations_not_stored') { say(error); return false }
        conversation = { id: null, title: 'Not saved', messages: [] }
      }
      opened.current = conversation.id
      if (conversation.id) history.replaceState(null, '', `#${conversation.id}`)
    }
    const cut = after === undefined ? conversation.messages.length : conversation.messages.findIndex((one) => one.id === after) + 1
    const kept = conversation.messages.slice(0, cut)
    const asked = text ? [{ role: 'user', content: text }] : []
    const last = kept[kept.length - 1]
    const prefix = continues ? last.content : ''
    setCurrent({ ...conversation, messages: [...(continues ? kept.slice(0, -1) : kept), ...asked.map((one) => ({ ...one, siblings: [] }))] })
    atEnd.current = true
    const sampling = Object.fromEntries(Object.keys(SAMPLING).filter((name) => options[name] != null).map((name) => [name, options[name]]))
    const body = { model, stream: true, ...sampling, messages: asked }
    if (conversation.id) Object.assign(body, { conversation_id: conversation.id, ...(after === undefined ? {} : { after }) })
    else body.messages = [...(options.system_prompt ? [{ role: 'system', content: options.system_prompt }] : []),
      ...kept.map(({ role, content }) => ({ role, content })), ...asked]
    if (continues) body.continue_final_message = true
    // Until the first event of its answer, the message is stored nowhere else.
    if (text && conversation.id) sessionStorage.setItem(UNANSWERED, JSON.stringify({ id: conversation.id, text }))
    follow(conversation.id, () => call('POST', '/api/chat/completions', body), null, prefix)
    return true
  }

  const branch = async (message, step) => {
    const target = message.siblings[message.siblings.indexOf(message.id) + step]
    setCurrent(await json('POST', `${CHATS}/${current.id}/branch`, { message_id: target }))
  }
  const edit = (message, before) => {
    setReplaces({ after: before?.id ?? '' })
    setDraft(message.content)
    input.current?.focus()
  }
  const rename = async (chat, title) => {
    await json('PATCH', `${CHATS}/${chat.id}`, { title })
    if (current?.id === chat.id) setCurrent({ ...current, title })
    list()
  }
  const remove = async (chat) => {
    if (!confirm(`Delete “${chat.title ?? 'New chat'}”?`)) return
    await call('DELETE', `${CHATS}/${chat.id}`)
    if (current?.id === chat.id) open(null)
    list()
  }

  useEffect(() => {
    const load = async () => {
      // /api/models has prices and needs an account; /v1/models has neither.
      const found = await json('GET', session.signed_in ? '/api/models' : '/v1/models').catch((error) => {
        if (error.status !== 404) throw error
        return json('GET', '/v1/models')
      })
      const known = found.data.filter((one) => one.ready !== false && !(one.capabilities?.embeddings))
      setModels(known)
      setModel((now) => now || stored('llmops-model', '') || known[0]?.id || '')
    }
    load().catch(say)
    list('')
    if (idInAddress()) open(idInAddress())
    // On a touch screen, the focus would open the keyboard over the page.
    if (matchMedia('(pointer: fine)').matches) input.current.focus()
    const moved = () => open(idInAddress())
    const keys = (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key === 'k') { event.preventDefault(); document.getElementById('search').focus() }
      if (event.key === 'Escape') { setDrawer(false); setSide(false) }
    }
    addEventListener('hashchange', moved)
    addEventListener('keydown', keys)
    return () => { removeEventListener('hashchange', moved); removeEventListener('keydown', keys) }
  }, [])
  useEffect(() => {
    keep('llmops-options', options)
    applyTheme(options.theme)
  }, [options])
  useEffect(() => { if (atEnd.current && log.current) log.current.scrollTop = log.current.scrollHeight }, [current, live])

  const halt = () => {
    // Before its first event, an answer has no id by which it could be stopped.
    live.stopped = true
    if (live.run) stop(live.run).catch(say)
  }
  const scrolled = () => { const box = log.current; atEnd.current = box.scrollHeight - box.scrollTop - box.clientHeight < 80 }
  const toEnd = () => { if (atEnd.current && log.current) log.current.scrollTop = log.current.scrollHeight }
  const copyCode = (event) => {
    const button = event.target.closest('.copy-code')
    if (button) copy(button.closest('.code').querySelector('code').textContent, button)
  }
  const messages = current?.messages ?? []
  return html`<div class=${`page${side ? ' with-side' : ''}`}>
    <a class="skip" href="#message" onClick=${(event) => { event.preventDefault(); input.current.focus() }}>To the message</a>
    <${Side} chats=${chats} current=${current} search=${search} onSearch=${(text) => { setSearch(text); list(text) }} onOpen=${open}
      onRename=${rename} onRemove=${remove} onMore=${more} session=${session} onSignOut=${onSignOut} />
    <main class="main">
      <header class="bar">
        <button class="menu" aria-label="Chats" aria-expanded=${side} onClick=${() => setSide(!side)}>☰</button>
        <h1>${current?.title ?? 'New chat'}</h1>
        <label class="hidden" for="model">Model</label>
        <select id="model" value=${model} onChange=${(event) => { setModel(event.target.value); keep('llmops-model', event.target.value) }}>
          ${models.map((one) => html`<option value=${one.id}>${described(one)}</option>`)}
        </select>
        <button ref=${settings} aria-expanded=${drawer} onClick=${() => setDrawer(!drawer)}>Settings</button>
      </header>
      <section class="log" role="log" aria-live="off" aria-label="Conversation" tabindex="0" ref=${log} onScroll=${scrolled} onClick=${copyCode}>
        ${!messages.length && !live && html`<p class="empty">Ask ${model || 'the model'} something.</p>`}
        ${messages.map((one, at) => html`<${Message} key=${one.id ?? at} message=${one} busy=${!!live} last=${at === messages.length - 1}
          onBranch=${(step) => branch(one, step).catch(say)} onEdit=${() => edit(one, messages[at - 1])}
          onRetry=${() => send(null, { after: messages[at - 1]?.id })} onContinue=${() => send(null, { after: one.id, continues: true })} />`)}
        ${live && html`<${Live} key=${'live'} live=${live} onPaint=${toEnd} />`}
        ${notice && html`<p class="notice" role="alert">${notice}</p>`}
      </section>
      <p class="hidden" role="status">${status}</p>
      <${Composer} input=${input} draft=${draft} setDraft=${setDraft} busy=${!!live} ready=${!!model} onStop=${halt} onProblem=${say}
        replaces=${replaces} onKeep=${() => { setReplaces(null); setDraft('') }}
        onSend=${async (text) => { const sent = await send(text, replaces ?? {}); if (sent) setReplaces(null); return sent }} />
    </main>
    ${drawer && html`<${Drawer} options=${options} setOptions=${setOptions} current=${current} onClose=${() => { setDrawer(false); settings.current.focus() }}
      onSystem=${(text) => current?.id && json('PATCH', `${CHATS}/${current.id}`, { system_prompt: text }).then((found) => setCurrent((now) => (now?.id === found.id ? { ...now, ...found } : now)), say)} />`}
  </div>`
}

function Side({ chats, current, search, onSearch, onOpen, onRename, onRemove, onMore, session, onSignOut }) {
  const [renaming, setRenaming] = useState(null)
  const submit = (event, chat) => {
    event.preventDefault()
    const title = new FormData(event.target).get('title').trim()
    setRenaming(null)
    if (title) onRename(chat, title)
  }
  return html`<nav class="side" aria-label="Chats">
    <div class="side-top"><button class="primary" onClick=${() => onOpen(null)}>New chat</button>
      <label class="hidden" for="search">Search chats</label>
      <input id="search" type="search" placeholder="Search (Ctrl K)" value=${search} onInput=${(event) => onSearch(event.target.value)} /></div>
    <ul class="chats">${chats.data.map((chat) => html`<li key=${chat.id} class=${chat.id === current?.id ? 'current' : ''}>
      ${renaming === chat.id
        ? html`<form onSubmit=${(event) => submit(event, chat)}><input name="title" aria-label="Title" defaultValue=${chat.title ?? ''} maxlength="500" autofocus onBlur=${() => setRenaming(null)} /></form>`
        : html`<button class="open" aria-current=${chat.id === current?.id} onClick=${() => onOpen(chat.id)}>${chat.title ?? 'New chat'}</button>
          <button class="plain" aria-label=${`Rename ${chat.title ?? 'New chat'}`} onClick=${() => setRenaming(chat.id)}>✎</button>
          <button class="plain" aria-label=${`Delete ${chat.title ?? 'New chat'}`} onClick=${() => onRemove(chat)}>✕</button>`}
    </li>`)}
    ${chats.has_more && html`<li><button class="plain" onClick=${onMore}>More</button></li>`}</ul>
    <div class="side-foot"><a class="plain" href=${`${CHATS}/export`} download>Export all</a>
      ${session.administered && html`<a class="plain" href="/admin">Administration</a>`}
      ${session.signed_in && html`<button class="plain" onClick=${onSignOut}>Sign out</button>`}</div>
  </nav>`
}

function Message({ message, busy, last, onBranch, onEdit, onRetry, onContinue }) {
  const mine = message.role === 'user'
  const shown = useMemo(() => (mine ? null : { __html: render(asCode(message.content ?? '')) }), [message.content])
  const place = message.siblings.indexOf(message.id)
  const cut = !mine && message.status === 'incomplete'
  return html`<article class=${`turn ${message.role}`} aria-label=${mine ? 'You' : message.model ?? message.role}>
    ${message.reasoning_content && html`<details><summary>Thinking</summary><div class="text">${message.reasoning_content}</div></details>`}
    ${mine ? html`<div class="body">${message.content}</div>` : html`<div class="body"><div dangerouslySetInnerHTML=${shown}></div></div>`}
    ${(message.tool_calls ?? []).map((one) => html`<details><summary>Calls ${one.function.name}</summary><pre>${pretty(one.function.arguments)}</pre></details>`)}
    ${cut && html`<p class="notice">${cutOf(message)}
      ${last && message.id && message.finish_reason !== 'content_filter' && html` <button onClick=${onContinue} disabled=${busy}>Continue</button>`}</p>`}
    <div class="foot"><span class="figures">${figures(message)}</span>
      ${message.siblings.length > 1 && html`<span role="group" aria-label="Versions">
        <button class="plain" aria-label="Previous version" disabled=${busy || place < 1} onClick=${() => onBranch(-1)}>‹</button>
        ${place + 1} / ${message.siblings.length}
        <button class="plain" aria-label="Next version" disabled=${busy || place === message.siblings.length - 1} onClick=${() => onBranch(1)}>›</button></span>`}
      <button class="plain" onClick=${(event) => copy(message.content, event.target)}>Copy</button>
      ${mine && message.id && html`<button class="plain" disabled=${busy} onClick=${onEdit}>Edit</button>`}
      ${!mine && last && message.id && html`<button class="plain" disabled=${busy} onClick=${onRetry}>Retry</button>`}
    </div>
  </article>`
}

const CUTS = {
  length: 'This answer reached the limit of its length.',
  content_filter: 'A safety filter ended this answer.',
  cancelled: 'This answer was stopped.',
  gateway_lost: 'The gateway stopped in the middle of this answer.',
  other: 'This answer is not complete.',
}
const cutOf = (message) => CUTS[message.finish_reason] ?? CUTS.other

/** The answer that is being written: its element is filled by LiveText, without a new rendering for each token. */
function Live({ live, onPaint }) {
  const element = useRef(null)
  const thinking = useRef(null)
  const calls = useRef(null)
  useEffect(() => {
    const view = new LiveText(element.current)
    const flush = view.flush.bind(view)
    view.flush = () => { flush(); onPaint() } // onPaint lays the page out, so that layout is measured
    view.write(live.text)
    live.view = view
    const node = thinking.current.querySelector('.text').firstChild ?? thinking.current.querySelector('.text').appendChild(document.createTextNode(''))
    live.onThinking = (text) => { thinking.current.hidden = false; node.appendData(text); onPaint() }
    if (live.thinking) live.onThinking(live.thinking)
    live.onCall = (at, text) => { callText(calls.current, at, live.calls[at].name).appendData(text); onPaint() }
    live.calls.forEach((call, at) => live.onCall(at, call.text))
    return () => { view.close(); live.view = live.onThinking = live.onCall = null }
  }, [live])
  return html`<article class="turn assistant" aria-label="Answer, being written" aria-busy="true">
    <details ref=${thinking} hidden><summary>Thinking …</summary><div class="text"></div></details>
    <div class="body writing" ref=${element}></div><div ref=${calls}></div></article>`
}

/** Return the text node of a tool call's arguments, in a new element for a new call. */
function callText(parent, at, name) {
  if (!parent.children[at]) {
    const box = parent.appendChild(document.createElement('details'))
    box.appendChild(document.createElement('summary')).textContent = `Calls ${name} …`
    box.appendChild(document.createElement('pre')).append(document.createTextNode(''))
  }
  return parent.children[at].lastChild.firstChild
}

function Composer({ input, draft, setDraft, busy, ready, onSend, onStop, onProblem, replaces, onKeep }) {
  const [files, setFiles] = useState([])
  const submit = async (event) => {
    event?.preventDefault()
    if (busy || !ready || !(draft.trim() || files.length)) return
    const attached = files.map(({ name, text }) => `File ${name}:\n\n\`\`\`\`\n${text}\n\`\`\`\`\n\n`).join('')
    const text = attached + draft.trim()
    setDraft(''); setFiles([])
    if (!(await onSend(text))) setDraft(draft)
  }
  const keys = (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit() }
    if (event.key === 'Escape' && busy) onStop()
  }
  const attach = async (event) => {
    for (const file of event.target.files) {
      if (file.size > LARGEST_FILE) { onProblem(new Error(`${file.name} has ${number.format(file.size)} bytes; attach at most ${number.format(LARGEST_FILE)}.`)); continue }
      const text = await file.text()
      if (text.includes('\0')) { onProblem(new Error(`${file.name} is not a text file; only text can be attached.`)); continue }
      setFiles((now) => [...now, { name: file.name.replace(/[`\n]/g, ''), text }])
    }
    event.target.value = ''
  }
  const picker = useRef(null)
  return html`<div class="composer"><form onSubmit=${submit}>
    ${replaces && html`<p class="notice">You are editing a message; the old one stays as another version. <button type="button" onClick=${onKeep}>Keep the old one</button></p>`}
    ${files.length > 0 && html`<div class="files">${files.map((one, at) => html`<span>${one.name} <button type="button" class="plain" aria-label=${`Remove ${one.name}`} onClick=${() => setFiles(files.filter((_, other) => other !== at))}>✕</button></span>`)}</div>`}
    <label class="hidden" for="message">Message</label>
    <textarea id="message" rows="2" ref=${input} placeholder="Message" value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${keys}></textarea>
    <div class="row"><button type="button" onClick=${() => picker.current.click()}>Attach text</button>
      <input type="file" multiple hidden ref=${picker} onChange=${attach} aria-label="Text files" />
      <span class="space">Enter sends, Shift+Enter begins a line</span>
      ${busy ? html`<button type="button" onClick=${onStop}>Stop</button>` : html`<button class="primary" disabled=${!ready}>Send</button>`}</div>
  </form></div>`
}

function Drawer({ options, setOptions, current, onClose, onSystem }) {
  // The update function reads the newest options, because two fields can change before a new render.
  const set = (name, value) => setOptions((now) => ({ ...now, [name]: value }))
  const system = current?.id ? current.system_prompt ?? '' : options.system_prompt
  return html`<aside class="drawer" role="dialog" aria-label="Settings">
    <h2>Settings</h2>
    <label>System prompt <small>${current?.id ? 'of this chat' : 'of new chats'}</small>
      <textarea key=${current?.id} defaultValue=${system} onChange=${(event) => (current?.id ? onSystem(event.target.value) : set('system_prompt', event.target.value))}></textarea></label>
    ${Object.entries(SAMPLING).map(([name, [label, min, max, step]]) => html`<label>${label} <small>empty: the model's own</small>
      <input type="number" min=${min} max=${max} step=${step} defaultValue=${options[name] ?? ''} onChange=${(event) => event.target.validity.valid && set(name, event.target.value === '' ? null : Number(event.target.value))} /></label>`)}
    <label>Colours <select value=${options.theme} onChange=${(event) => set('theme', event.target.value)}>
      <option value="auto">as the system</option><option value="light">light</option><option value="dark">dark</option></select></label>
    <button class="primary" onClick=${onClose} autofocus>Done</button>
  </aside>`
}

function described(model) {
  const window = model.context_window ?? model.max_model_len
  const price = model.price && ` · $${model.price.input}/$${model.price.output} per M`
  return `${model.id}${window ? ` · ${number.format(window)} tokens` : ''}${price ?? ''}`
}

function figures({ model, usage, cost_usd: cost, latency_ms: ms }) {
  const parts = [model]
  if (usage?.completion_tokens != null) parts.push(`${number.format(usage.prompt_tokens ?? 0)} + ${number.format(usage.completion_tokens)} tokens`)
  if (cost != null) parts.push(`$${cost.toFixed(6)}`)
  if (ms) parts.push(`${(ms / 1000).toFixed(1)} s`)
  return parts.filter(Boolean).join(' · ')
}

/** Return markdown that shows a JSON answer as code, and any other answer as it is. */
function asCode(text) {
  if (!/^\s*[{[]/.test(text)) return text
  try { JSON.parse(text) } catch { return text }
  return `~~~~json\n${pretty(text)}\n~~~~`
}

/** Levels of lists and objects in each other up to which JSON is indented: 4,000 would make 32 MB of 8 KB. */
const DEEPEST_JSON = 64

/** Indent JSON, but not where a number would lose digits. */
function pretty(text) {
  let depth = 0
  for (const one of text) if (one === '[' || one === '{') { if (++depth > DEEPEST_JSON) return text } else if (one === ']' || one === '}') depth -= 1
  if (/\d{16}/.test(text)) return text
  try { return JSON.stringify(JSON.parse(text), null, 2) } catch { return text }
}

mount(html`<${App} />`, document.getElementById('app'))
