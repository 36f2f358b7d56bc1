// What all widgets have: the site's colours, the height of the frame they are in, and small helpers.
const $ = (id) => document.getElementById(id);

function readableBytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) { value /= 1000; at += 1; }
  const digits = at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[at]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

function make(tag, attributes = {}, ...children) {
  const isShape = ["svg", "g", "path", "rect", "circle", "line", "text", "defs", "marker", "pattern", "title"].includes(tag);
  const element = isShape ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The site has a switch of its own for light and dark. Inside a page of it, follow the switch; opened alone, what it was
// last set to; everywhere else, the system's setting, which is what the style sheet does by itself.
function followTheSite() {
  const set = (scheme) => { document.documentElement.style.colorScheme = scheme === "slate" ? "dark" : "light"; };
  try {
    const site = window.parent !== window && window.parent.document.body;
    if (site && site.hasAttribute("data-md-color-scheme")) {
      const apply = () => set(site.getAttribute("data-md-color-scheme"));
      new MutationObserver(apply).observe(site, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
      apply();
      return;
    }
    for (const key of Object.keys(localStorage)) {
      if (!key.endsWith(".__palette") || !location.pathname.startsWith(key.slice(0, -".__palette".length))) continue;
      const { color } = JSON.parse(localStorage.getItem(key));
      if (color && color.scheme && color.media !== "(prefers-color-scheme)") set(color.scheme);
    }
  } catch { /* another origin, or no storage: the system's setting */ }
}

function fitTheFrame() {
  let frame = null;
  try { frame = window.frameElement; } catch { return; }
  if (!frame) return;
  new ResizeObserver(() => { frame.style.height = `${document.body.offsetHeight + 2}px`; }).observe(document.body);
}

// Left and right step through, unless a control that needs these keys has the focus.
function onArrows(back, forth) {
  addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName) || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowLeft") back();
    else if (event.key === "ArrowRight") forth();
    else return;
    event.preventDefault();
  });
}

// ring.html#ranks=6&step=3: controls by their ids, so that a text can point at what it speaks of.
const asked = new URLSearchParams(location.hash.slice(1));
function setAsAsked() {
  for (const [id, value] of asked) if ($(id) && "value" in $(id)) $(id).value = value;
}

followTheSite();
fitTheFrame();
