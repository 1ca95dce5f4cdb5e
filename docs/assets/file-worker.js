// Search runs in a worker. Browsers refuse workers on pages opened from disk, so there a hidden frame stands in for one: it
// runs the worker's script and passes messages both ways, copied and later, as a worker would get them.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.#later(data, (event) => this.onmessage?.(event));
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = resolve;
        script.onerror = (event) => { this.onerror?.(event); reject(event); };
        inside.document.body.append(script);
      });
    }
    #later(data, deliver) {
      const copy = structuredClone(data);
      setTimeout(() => deliver(new MessageEvent("message", { data: copy })));
    }
    postMessage(data) {
      this.ready.then(() => this.#later(data, (event) => this.frame.contentWindow.dispatchEvent(event)));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
