// Draws the view, and draws it again whenever a live page has fetched a new one.
function drawAll(view) {
  const focused = document.activeElement && document.activeElement.id;
  const opened = [...document.querySelectorAll('details[open]')].map((details) => details.dataset.key).filter(Boolean);
  charts = 0;
  by('title').textContent = heading(view);
  by('run').textContent = view.run;
  by('state').textContent = view.state;
  by('state').dataset.state = view.state;
  by('made').textContent = `Themis ${view.version} · ${view.run}`;
  for (const [, draw] of Object.values(SECTIONS)) draw(view);
  for (const details of document.querySelectorAll('details')) if (opened.includes(details.dataset.key)) details.open = true;
  if (focused && by(focused) && document.activeElement !== by(focused)) by(focused).focus({ preventScroll: true });
}

async function follow(address, before) {
  let last = before, state = JSON.parse(before).state, tag = '';
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, state === 'running' ? 2000 : 10000));
    try {
      const answer = await fetch(address, { cache: 'no-store', headers: tag ? { 'If-None-Match': tag } : {} });
      if (answer.status === 503) {  // there is no run to show at the moment
        tag = '';
        by('state').textContent = (await answer.json()).message;
        continue;
      }
      if (!answer.ok && answer.status !== 304) throw new Error(answer.statusText);
      tag = answer.headers.get('ETag') || '';
      const text = answer.status === 304 ? last : await answer.text();
      if (text !== last) {
        const view = JSON.parse(text);
        [last, state] = [text, view.state];
        const [x, y] = [scrollX, scrollY];
        drawAll(view);
        scrollTo(x, y);
      } else by('state').textContent = state;
    } catch {
      by('state').textContent = `${state} (no connection, trying again)`;
    }
  }
}

// Details cannot be unfolded on paper, so the configuration is unfolded before printing.
let unfolded = [];
addEventListener('beforeprint', () => {
  unfolded = [...document.querySelectorAll('#reproduce details:not([open])')];
  for (const details of unfolded) details.open = true;
});
addEventListener('afterprint', () => { for (const details of unfolded) details.open = false; });

chooseTheme();
layOut(Object.fromEntries(Object.entries(SECTIONS).map(([id, [name]]) => [id, name])));
const first = by('view').textContent;
drawAll(JSON.parse(first));
if (document.body.dataset.live) follow(document.body.dataset.live, first);
