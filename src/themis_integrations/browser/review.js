// Marks one fault after another: keys v, i and ?, u to undo, and the arrows to look at earlier ones.
const NAMES = { valid: 'Valid (v)', invalid: 'Invalid (i)', unsure: 'Unsure (?)' };
const KEYS = { v: 'valid', i: 'invalid', '?': 'unsure' };
const known = new Map();
let place = 0, fault = null, progress = null, isBusy = false; // what is fetched ahead does not know the progress

async function ask(k, mark) {
  const options = mark ? { method: 'POST', body: mark, headers: { 'Content-Type': 'text/plain' } } : {};
  const answer = await fetch(`fault/${k}${document.body.dataset.live}`, { cache: 'no-store', ...options });
  const isJson = (answer.headers.get('Content-Type') || '').startsWith('application/json');
  const content = isJson ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// One thing at a time: a key that is pressed while the last mark is being stored does nothing.
async function alone(work) {
  if (isBusy) return;
  isBusy = true;
  try {
    await work();
  } catch (error) {
    by('state').textContent = `not stored: ${error.message}`;
    by('state').dataset.state = 'failed';
  }
  isBusy = false;
}

async function go(k) {
  fault = known.get(k) || await ask(k);
  known.delete(k); // its marks may change
  place = k;
  draw();
  if (k + 1 < progress.n && !known.has(k + 1)) ask(k + 1).then((next) => known.set(k + 1, next), () => {});
}

const start = () => alone(async () => { progress = await ask(0); await go(progress.first); });
const mark = (name) => alone(async () => {
  if (!fault || fault.result) return;
  progress = await ask(place, name);
  await go(Math.min(place + 1, progress.first));
});
const back = () => alone(async () => { if (place > 0) await go(place - 1); });
const onward = () => alone(async () => { if (fault && !fault.result && fault.mark) await go(place + 1); });
const undo = () => alone(async () => {
  const at = fault && !fault.result && fault.mark ? place : place - 1;
  if (at < 0) return;
  progress = await ask(at, 'undone');
  known.clear();
  await go(at);
});

const button = (text, act, attributes) => el('button', { type: 'button', onclick: act, ...attributes }, text);
function draw() {
  const { n, marked, reviewer } = progress;
  by('state').textContent = `${whole(marked)} of ${whole(n)} marked by ${reviewer}`;
  by('state').dataset.state = '';
  const earlier = [button('Back (←)', back, { disabled: place === 0 }), button('Undo (u)', undo, { disabled: place === 0 && !fault.mark })];
  if (fault.result) {
    return show('review', 'All faults of the sample are marked', fault.result.map((line) => el('p', {}, line)),
      note('Marks are stored in the run folder. Close this page, and stop the command with Ctrl-C.'), el('p', {}, earlier));
  }
  const picture = (source, name, text, tone) => el('figure', {}, el('div', { class: 'frame' }, el('img', { src: source, alt: `${name} input` })),
    el('figcaption', {}, `${name}, answered `, el('span', { class: tone }, text)));
  show('review', `Fault ${whole(place + 1)} of ${whole(n)}`,
    el('div', { class: 'pictures pair review' }, picture(fault.clean, 'clean', fault.before, 'right'),
      picture(fault.disturbed, 'disturbed', fault.after, 'wrong')),
    el('p', {}, 'Could a person still give the right answer to the disturbed input? Then the fault is valid.'),
    el('p', {}, Object.entries(NAMES).map(([name, text]) => [button(text, () => mark(name), { 'aria-pressed': String(fault.mark === name) }), ' ']).flat()),
    el('p', {}, earlier.flatMap((each) => [each, ' ']), button('Next (→)', onward, { disabled: !fault.mark })), note(fault.facts));
}

addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const acts = { u: undo, Backspace: undo, ArrowLeft: back, ArrowRight: onward };
  if (KEYS[event.key]) mark(KEYS[event.key]);
  else if (acts[event.key]) acts[event.key]();
  else return;
  event.preventDefault();
});
chooseTheme();
layOut({ review: 'Review' });
by('title').textContent = 'Is it a valid test?';
by('run').textContent = JSON.parse(by('view').textContent).run;
start();
