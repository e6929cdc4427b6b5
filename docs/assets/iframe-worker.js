// A page that is read from disk may start no worker. Then the script of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      // Some browsers replace the first document of a frame unless one is written.
      inner.document.open();
      inner.document.write("<body></body>");
      inner.document.close();
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => {
        const script = inner.document.createElement("script");
        script.src = new URL(url, location);
        script.onload = () => resolve(inner);
        inner.document.body.append(script);
      });
    }

    async postMessage(data) {
      const inner = await this.loaded;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
  };
  window.Worker = window.IFrameWorker;
}
