#!/usr/bin/env python3
"""Drives a headless Chromium through its DevTools pipe, with the standard library alone.

A test passes steps as JSON on standard input, and reads an answer a line. The steps are:
  {"open": URL}              loads a page, and waits until it is loaded
  {"eval": EXPRESSION}       answers the value of an expression of JavaScript
  {"move_to": [SELECTOR, P]} scrolls to an element, and moves the mouse into it: P is the part of its width
  {"key": NAME}              presses a key: "ArrowLeft"
  {"size": [W, H, MOBILE]}   sets the size of the window
  {"dark": BOOL}             sets the preferred colours
  {"screenshot": FILE}       writes a PNG of the window, {"full": true} of the whole page
  {"messages": true}         answers errors and warnings of the console since the start
  {"requests": true}         answers the addresses that were asked for
  {"append": [FILE, TEXT]}   appends to a file
  {"wait": SECONDS}          waits
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
import time


class Browser:
    def __init__(self, program, profile):
        to_child, self.out = os.pipe()
        self.into, from_child = os.pipe()

        def move_pipes():  # DevTools reads descriptor 3 and writes descriptor 4
            high = os.dup(to_child), os.dup(from_child)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
             f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            close_fds=False, preexec_fn=move_pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_child)
        os.close(from_child)
        self.buffer, self.last, self.events = b"", 0, []
        target = self.call("Target.getTargets")["targetInfos"]
        page = next(each for each in target if each["type"] == "page")
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def read(self):
        while b"\0" not in self.buffer:
            got = os.read(self.into, 1 << 20)
            if not got:
                raise RuntimeError("Chromium has ended")
            self.buffer += got
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.last += 1
        request = {"id": self.last, "method": method, "params": params}
        if getattr(self, "session", None):
            request["sessionId"] = self.session
        os.write(self.out, json.dumps(request).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, url):
        begin = len(self.events)
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events[begin:]):
            self.events.append(self.read())

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path, full):
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        else:
            shot = self.call("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def messages(self):
        self.call("Runtime.evaluate", expression="0")  # what came before it has been read then
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append("exception: " + json.dumps(params["exceptionDetails"]))
            if method == "Log.entryAdded":
                found.append(f"{params['entry']['level']}: {params['entry']['text']} {params['entry'].get('url', '')}")
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append("console: " + json.dumps(params["args"]))
        return found

    def requests(self):
        return [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]

    def step(self, step):
        if "open" in step:
            self.open(step["open"])
        elif "eval" in step:
            return self.evaluate(step["eval"])
        elif "move_to" in step:
            selector, part = step["move_to"]
            x, y = self.evaluate(f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
                e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();
                return [b.left + b.width * {part}, b.top + b.height * 0.4]; }})()""")
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        elif "key" in step:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=step["key"], code=step["key"])
        elif "size" in step:
            width, height, mobile = step["size"]
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=step.get("scale", 1),
                      mobile=mobile)
        elif "dark" in step:
            colours = "dark" if step["dark"] else "light"
            self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])
        elif "screenshot" in step:
            self.screenshot(step["screenshot"], step.get("full", False))
        elif "messages" in step:
            return self.messages()
        elif "requests" in step:
            return self.requests()
        elif "append" in step:
            with open(step["append"][0], "a", encoding="utf-8") as file:
                file.write(step["append"][1])
        elif "wait" in step:
            time.sleep(step["wait"])
        else:
            raise ValueError(f"no such step: {step}")
        return None


def main():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # the browser still writes to it
        browser = Browser(sys.argv[1], profile)
        try:
            for line in sys.stdin:
                print(json.dumps(browser.step(json.loads(line))), flush=True)
        finally:
            browser.process.kill()
            browser.process.wait()


if __name__ == "__main__":
    sys.exit(main())
