/* SPDX-License-Identifier: MIT
 *
 * A browser starts no Worker from a page that was opened as a file. The search then runs in a hidden frame, which loads the
 * worker's script and exchanges the same messages. Pages of a server keep the browser's Worker. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => { this.frame.onload = resolve; });
      this.frame.srcdoc = `<script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
          const script = document.createElement("script");
          script.src = url; script.onload = resolve; script.onerror = reject;
          document.head.appendChild(script);
        })), Promise.resolve());
        </scr` + `ipt><script src="${new URL(url, location.href)}"></scr` + `ipt>`;
      document.body.appendChild(this.frame);
      window.addEventListener("message", (event) => {
        if (event.source === this.frame.contentWindow) {
          const message = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(message);
          if (this.onmessage) this.onmessage(message);
        }
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() { this.frame.remove(); }
  };
}
