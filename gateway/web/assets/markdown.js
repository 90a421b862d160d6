// Markdown to safe HTML, whole and while it is being written.

import { Lexer, Marked } from './vendor/marked.js'
import DOMPurify from './vendor/purify.js'
import hljs from './vendor/highlight.js'
import bash from './vendor/highlight-bash.js'
import c from './vendor/highlight-c.js'
import cpp from './vendor/highlight-cpp.js'
import css from './vendor/highlight-css.js'
import diff from './vendor/highlight-diff.js'
import go from './vendor/highlight-go.js'
import java from './vendor/highlight-java.js'
import javascript from './vendor/highlight-javascript.js'
import jsonLanguage from './vendor/highlight-json.js'
import markdown from './vendor/highlight-markdown.js'
import python from './vendor/highlight-python.js'
import rust from './vendor/highlight-rust.js'
import sql from './vendor/highlight-sql.js'
import typescript from './vendor/highlight-typescript.js'
import xml from './vendor/highlight-xml.js'
import yaml from './vendor/highlight-yaml.js'

const languages = { bash, c, cpp, css, diff, go, java, javascript, json: jsonLanguage, markdown, python, rust, sql,
  typescript, xml, yaml }
for (const [name, language] of Object.entries(languages)) hljs.registerLanguage(name, language)

/** Characters of code that are highlighted, and of its lines: more would hold the page up for a noticeable time. */
const LONGEST_HIGHLIGHTED = 30000
const LONGEST_LINE = /[^\n]{1000}/
/** Characters of a paragraph, and levels of quotes and lists in each other, beyond which text is shown as it is:
 * marked takes time that grows with the square of the one, and has no stack for thousands of the other. */
const LONGEST_PARAGRAPH = 8000
const DEEPEST = 64
/** Characters of an unfinished paragraph that are rendered again with each frame; a longer one is shown as plain text. */
const LONGEST_LIVE = 4000
/** Milliseconds between two paints, at least; a paint that takes longer is followed by REST times its duration. */
const SHORTEST_PAUSE = 40
const REST = 5

const escape = (text) =>
  text.replace(/[&<>"']/g, (one) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' })[one])

function code({ text, lang }) {
  const name = (lang ?? '').match(/^[\w+#-]*/)[0].toLowerCase()
  const known = hljs.getLanguage(name) && text.length <= LONGEST_HIGHLIGHTED && !LONGEST_LINE.test(text)
  const shown = known ? hljs.highlight(text, { language: name, ignoreIllegals: true }).value : escape(text)
  const head = `<span>${escape(name || 'text')}</span><button type="button" class="copy-code">Copy</button>`
  return `<div class="code"><div class="code-head">${head}</div><pre tabindex="0"><code>${shown}</code></pre></div>`
}

// A model's HTML becomes text and its images become links, so that neither fetches anything.
const html = ({ text }) => escape(text)
const image = ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`

class BoundedLexer extends Lexer {
  depth = 0

  within(lex) {
    this.depth += 1
    try { return lex() } finally { this.depth -= 1 }
  }

  blockTokens(text, tokens = [], ...rest) {
    if (this.depth < DEEPEST) return this.within(() => super.blockTokens(text, tokens, ...rest))
    tokens.push({ type: 'paragraph', raw: text, text, tokens: [plain(text)] })
    return tokens
  }

  inlineTokens(text, tokens = []) {
    if (this.depth < DEEPEST && text.length <= LONGEST_PARAGRAPH) return this.within(() => super.inlineTokens(text, tokens))
    tokens.push(plain(text))
    return tokens
  }
}

const plain = (text) => ({ type: 'text', raw: text, text, escaped: false })
const hooks = { provideLexer: () => (text, options) => new BoundedLexer(options).lex(text) }
const marked = new Marked({ gfm: true, breaks: true, renderer: { code, html, image }, hooks })

const PURIFY = {
  RETURN_TRUSTED_TYPE: true,
  ALLOWED_TAGS: ['a', 'b', 'blockquote', 'br', 'button', 'code', 'del', 'div', 'em', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6',
    'hr', 'i', 'li', 'ol', 'p', 'pre', 'span', 'strong', 'table', 'tbody', 'td', 'th', 'thead', 'tr', 'ul'],
  ALLOWED_ATTR: ['class', 'href', 'rel', 'start', 'tabindex', 'target', 'type', 'align'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
}

DOMPurify.addHook('afterSanitizeAttributes', (node) => {
  if (node.tagName === 'A') {
    node.setAttribute('target', '_blank')
    node.setAttribute('rel', 'noopener noreferrer')
  }
})

/** Return markdown as HTML that can be shown. */
export const render = (text) => DOMPurify.sanitize(marked.parse(text), PURIFY)

const FENCE = /^ {0,3}(`{3,}|~{3,})/
// Pattern of a line that continues the block before a blank line.
const CONTINUES = /^(?:\s|[-*+>] ?|\d+[.)]\s|\|)/

/**
 * An answer that is being written. Blocks that have ended are rendered once; only the last one is touched again, so
 * that the work for a token does not grow with the answer.
 */
export class LiveText {
  constructor(element) {
    this.element = element
    this.queue = ''
    this.frame = 0
    this.pause = 0
    this.reset()
  }

  reset() {
    this.done = document.createElement('div')
    this.tail = document.createElement('div')
    this.element.replaceChildren(this.done, this.tail)
    this.begin('')
    this.line = ''
  }

  begin(text) {
    this.block = text
    this.fence = null
    this.blank = false
    this.plain = null
    this.painted = 0
  }

  write(text) {
    this.queue += text
    this.frame ||= setTimeout(() => { this.frame = requestAnimationFrame(() => this.timedFlush()) }, this.pause)
  }

  /** Paint, and measure by how long the next paint has to wait, so that painting takes a bounded share of a core. */
  timedFlush() {
    const begun = performance.now()
    this.flush()
    this.pause = Math.max(SHORTEST_PAUSE, REST * (performance.now() - begun))
  }

  flush() {
    this.frame = 0
    const text = this.queue
    this.queue = ''
    for (let at = 0; at < text.length; ) {
      const end = text.indexOf('\n', at)
      const part = text.slice(at, end < 0 ? text.length : end + 1)
      at += part.length
      this.block += part
      this.line += part
      if (end >= 0) {
        this.lineDone(this.line)
        this.line = ''
      }
    }
    this.paint()
  }

  lineDone(line) {
    const fence = line.match(FENCE)
    if (this.fence) {
      if (fence && fence[1].startsWith(this.fence) && !line.slice(fence[0].length).trim()) this.settle('')
    } else if (fence) {
      this.settle(line)
      this.fence = fence[1]
      this.painted = line.length // the opening line is not code
    } else if (!line.trim()) {
      this.blank = true
    } else if (this.blank && (!CONTINUES.test(line) || this.block.length > LONGEST_LIVE / 2)) {
      this.settle(line)
    } else {
      this.blank = false
    }
  }

  /** Render the block for good, but for `next`, with which the next one begins. */
  settle(next) {
    const text = next ? this.block.slice(0, this.block.length - next.length) : this.block
    if (text.trim()) {
      const element = document.createElement('div')
      element.innerHTML = render(text)
      this.done.append(element)
    }
    this.tail.replaceChildren()
    this.begin(next)
  }

  paint() {
    if (!this.fence && this.block.length <= LONGEST_LIVE) {
      this.tail.innerHTML = render(this.block)
      return
    }
    if (!this.plain) {
      this.box = document.createElement(this.fence ? 'pre' : 'p')
      this.box.className = 'unfinished'
      this.tail.replaceChildren(this.box)
      this.plain = this.box.appendChild(document.createElement('div')).appendChild(document.createTextNode(''))
    }
    const text = this.block.slice(this.painted)
    this.painted = this.block.length
    // A browser lays out a whole element again, so long code continues in a new element.
    const end = this.plain.length > LONGEST_LIVE / 2 ? text.indexOf('\n') + 1 : 0
    this.plain.appendData(end ? text.slice(0, end) : text)
    if (end) this.plain = this.box.appendChild(document.createElement('div')).appendChild(document.createTextNode(text.slice(end)))
  }

  close() {
    clearTimeout(this.frame)
    cancelAnimationFrame(this.frame)
  }
}
