// SPDX-License-Identifier: BSD-3-Clause
// Follow a job, or its logs. Texts come as JSON strings; the server has escaped those that are HTML.
"use strict";

const MAX_LINES = 5000;

function follow(path, show) {
  const source = new EventSource(path + location.search);
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.addEventListener("end", () => source.close());
  return source;
}

function showJob(html) {
  const page = new DOMParser().parseFromString(html, "text/html");
  const shown = [...document.querySelector("main").children], next = [...page.querySelector("main").children];
  document.title = page.title;
  if (shown.length !== next.length) {
    document.querySelector("main").replaceChildren(...next);
    return;
  }
  // What has not changed stays as it is, with its place and its selection.
  shown.forEach((part, at) => { if (part.outerHTML !== next[at].outerHTML) part.replaceWith(next[at]); });
}

function showLine(lines, text) {
  const isAtEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 20;
  lines.append(text + "\n");
  if (lines.childNodes.length > MAX_LINES) lines.firstChild.remove();
  if (isAtEnd) lines.scrollTop = lines.scrollHeight;
}

const lines = document.getElementById("lines");
if (location.pathname === "/job") follow("/changes", showJob);
// After a break all lines come again.
if (lines) follow("/lines", (text) => showLine(lines, text)).onopen = () => lines.replaceChildren();
