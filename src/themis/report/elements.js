// DOM elements and number formats. Data becomes text nodes and attributes, never markup.
const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === 'function') node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const by = (id) => document.getElementById(id);

// Creates sections, and the links to them, from their names by id.
function layOut(names) {
  for (const [id, name] of Object.entries(names)) {
    by('sections').append(el('li', {}, el('a', { href: `#${id}` }, name)));
    by('main').append(el('section', { id, 'aria-labelledby': `h-${id}` }));
  }
}

// Replaces the contents of a section, including its heading.
function show(id, title, ...children) {
  setHidden(id, false);
  by(id).replaceChildren(el('h2', { id: `h-${id}` }, title), ...children.flat().filter(Boolean));
}

// Hides a section that does not apply to this run, and its link.
function setHidden(id, isHidden) {
  for (const node of [by(id), document.querySelector(`nav a[href="#${id}"]`).parentElement]) node.hidden = isHidden;
}

const whole = (n) => Number(n).toLocaleString('en-GB');
const number = (x, digits = 3) => {
  if (x === null || x === undefined) return '–';
  if (typeof x !== 'number') return String(x);
  if (x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3)) return x.toExponential(digits - 1);
  return String(Number(x.toPrecision(digits)));
};
// A percentage that shows 100 or 0 only if the share is exactly 1 or 0.
function percent(share, digits = 1) {
  if (share === null || share === undefined) return '–';
  const text = (100 * share).toFixed(digits);
  const least = 10 ** -digits;
  if (share < 1 && text === (100).toFixed(digits)) return `>${(100 - least).toFixed(digits)}%`;
  if (share > 0 && text === (0).toFixed(digits)) return `<${least.toFixed(digits)}%`;
  return `${text}%`;
}
const interval = (e, digits = 2) => (e ? `95%: ${percent(e.low, digits)} to ${percent(e.high, digits)}` : '');
const many = (n, word) => `${whole(n)} ${word}${n === 1 ? '' : 's'}`;
const seconds = (s) => (s < 120 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`);
const forecast = (n) => `about ${whole(Number(n.toPrecision(2)))} more tests`;
const note = (text) => el('p', { class: 'note' }, text);

// A table of headings and rows. The first cell of a row is its heading; columns of numbers are aligned to the right.
function table(caption, heads, rows, attributes) {
  const isNumber = heads.map((_, k) => k > 0 && rows.every((row) => /^[<>]?[-\d–]/.test(row[k]) && !/[a-z]{3}/i.test(row[k])));
  const cell = (value, k) => (k ? el('td', { class: isNumber[k] ? 'number' : null }, value) : el('th', { scope: 'row' }, value));
  return el(
    'table', attributes || {},
    el('caption', {}, caption),
    el('thead', {}, el('tr', {}, heads.map((head, k) => el('th', { scope: 'col', class: isNumber[k] ? 'number' : null }, head)))),
    el('tbody', {}, rows.map((row) => el('tr', {}, row.map(cell)))),
  );
}

// A box that scrolls on its own, also by keyboard, if its content is too wide; its edge fades where there is more.
function scrolling(label, ...children) {
  const box = el('div', { class: 'scrolling', role: 'group', 'aria-label': label, tabindex: '0' }, ...children);
  const hint = el('p', { class: 'more', 'aria-hidden': 'true' });
  const update = () => {
    const right = box.scrollWidth - box.clientWidth - box.scrollLeft > 1;
    const below = box.scrollHeight - box.clientHeight - box.scrollTop > 1;
    box.dataset.more = `${right ? 'right' : ''} ${below ? 'below' : ''}`.trim();
    hint.textContent = right ? 'Scroll sideways for more →' : below ? 'Scroll down for more ↓' : '';
  };
  box.addEventListener('scroll', update, { passive: true });
  new ResizeObserver(update).observe(box);
  return el('div', { class: 'scrolled' }, box, hint);
}

// The limits that the user set, those that failed first.
function drawGates(view) {
  if (!view.gates) return setHidden('gates', true);
  const isSuite = view.gates.rows.some((row) => row.member);
  const word = (row) => (!row.has_passed ? 'FAILED' : row.is_judged === false ? 'skipped' : 'passed');
  const rows = view.gates.rows.map((row) => [el('strong', { class: word(row).toLowerCase() }, word(row)),
    ...(isSuite ? [row.member] : []), row.gate, row.text, row.remedy]);
  show('gates', 'Gates', scrolling('Gates', table(view.gates.sentence,
    ['result', ...(isSuite ? ['perturbation'] : []), 'gate', 'value and limit', 'what to do'], rows, { class: 'plain' })));
}

// A shell command with its purpose and a button that copies it.
function command(text, purpose) {
  const status = el('span', { class: 'quiet', role: 'status' });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      status.textContent = 'copied';
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      status.textContent = 'selected';
    }
  };
  const code = el('code', {}, text);
  const button = el('button', { type: 'button', class: 'small', 'aria-label': `Copy: ${text}`, onclick: copy }, 'Copy');
  return el('div', { class: 'command' }, purpose ? el('span', { class: 'what' }, purpose) : null, code, button, status);
}

function chooseTheme() {
  const button = by('theme');
  const system = matchMedia('(prefers-color-scheme: dark)');
  let chosen = null;
  try { chosen = localStorage.getItem('themis-theme'); } catch { /* pages opened from a file may have no storage */ }
  const apply = () => {
    const isDark = chosen ? chosen === 'dark' : system.matches;
    document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
    button.textContent = isDark ? 'Light theme' : 'Dark theme';
  };
  button.addEventListener('click', () => {
    chosen = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
    try { localStorage.setItem('themis-theme', chosen); } catch { /* the choice lasts for this visit */ }
    apply();
  });
  system.addEventListener('change', apply);
  apply();
}
