// A stacked bar chart of days as SVG, in the colours of the reports.

import { html } from './common.js'

const WIDTH = 720
const HEIGHT = 240
const LEFT = 64
const BOTTOM = 28
/** Groups with a colour of their own; the rest is one group. */
export const COLOURS = ['a', 'b', 'c', 'd', 'f', 'g']

/** Return about four round values from 0 to at least `high`. */
export function ticks(high) {
  const power = 10 ** Math.floor(Math.log10(high / 3 || 1))
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => high / one <= 4) ?? power * 10
  return Array.from({ length: Math.ceil(high / step) + 1 }, (_, at) => at * step)
}

/**
 * Return a figure: a bar per day, with a part per group.
 *
 * @param title The caption.
 * @param days Every day of the range, in order.
 * @param groups Names of the groups, the largest first.
 * @param value Returns the value of a day and a group.
 * @param format Writes a value.
 */
export function StackedDays({ title, days, groups, value, format }) {
  const shown = groups.slice(0, COLOURS.length)
  const others = groups.slice(COLOURS.length)
  const parts = [...shown.map((name) => [name, (day) => value(day, name)]),
    ...(others.length ? [[`${others.length} others`, (day) => others.reduce((sum, one) => sum + value(day, one), 0)]] : [])]
  const totals = days.map((day) => parts.reduce((sum, [, of]) => sum + of(day), 0))
  const marks = ticks(Math.max(...totals, 0) || 1)
  const top = marks[marks.length - 1]
  const y = (amount) => HEIGHT - BOTTOM - (amount / top) * (HEIGHT - BOTTOM - 12)
  const step = (WIDTH - LEFT - 8) / days.length
  const every = Math.ceil(days.length / 8)
  const colour = (at) => `var(--${at < COLOURS.length ? COLOURS[at] : 'e'})`
  const bars = days.flatMap((day, at) => {
    let base = 0
    return parts.map(([name, of], part) => {
      const amount = of(day)
      base += amount
      return amount > 0 && html`<rect x=${LEFT + at * step + step * 0.1} y=${y(base)} width=${step * 0.8} height=${y(base - amount) - y(base)}
        fill=${colour(part)}><title>${`${day}, ${name}: ${format(amount)}`}</title></rect>`
    })
  })
  const sum = totals.reduce((all, one) => all + one, 0)
  return html`<figure><figcaption>${title}: ${format(sum)}</figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label=${`${title}, ${days[0]} to ${days[days.length - 1]}: ${format(sum)} in all, at most ${format(Math.max(...totals))} a day. The table has the numbers.`}>
      ${marks.map((one) => html`<g><line class="grid" x1=${LEFT} x2=${WIDTH - 8} y1=${y(one)} y2=${y(one)} /><text x=${LEFT - 6} y=${y(one) + 4} text-anchor="end">${format(one)}</text></g>`)}
      ${bars}
      ${days.map((day, at) => at % every === 0 && html`<text x=${LEFT + (at + 0.5) * step} y=${HEIGHT - 8} text-anchor="middle">${day.slice(5)}</text>`)}
    </svg>
    <ul class="legend">${parts.map(([name], at) => html`<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" fill=${colour(at)} /></svg>${name}</li>`)}</ul>
  </figure>`
}
