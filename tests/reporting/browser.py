"""Open a file in Qt WebEngine (Chromium), run JavaScript in it, and print what came of it as JSON.

python browser.py FILE JAVASCRIPT  ->  {"loaded": bool, "result": ..., "console": [lines], "requests": [addresses]}

A process of its own, because a browser that fails ends its process. Exit code 3: something is not installed.
"""

import json
import os
import sys

MISSING = 3
WIDTH, HEIGHT, SECONDS = 1100, 900, 60

os.environ |= {
    "QT_QPA_PLATFORM": "offscreen",
    "QTWEBENGINE_DISABLE_SANDBOX": "1",  # containers run as root, which the sandbox refuses
    "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu --no-sandbox",
}

try:
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication
except ImportError as error:  # PySide6 itself, or a library of the system that it is linked with
    print(error, file=sys.stderr)
    sys.exit(MISSING)


class Requests(QWebEngineUrlRequestInterceptor):
    """Keeps the addresses that are asked for."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def interceptRequest(self, info):  # Qt's name
        self.addresses.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    """Keeps what is said on the console, errors of scripts among it."""

    def __init__(self, profile):
        super().__init__(profile)
        self.console = []

    def javaScriptConsoleMessage(self, level, message, line, source):  # Qt's name
        self.console.append(f"{level.name}: {message} (line {line} of {source})")


def main(path, script):
    application = QApplication(sys.argv[:1])
    requests, profile, view = (
        Requests(),
        QWebEngineProfile(),
        QWebEngineView(),
    )  # a profile without a name keeps nothing
    profile.setUrlRequestInterceptor(requests)
    page = Page(profile)
    view.setPage(page)
    view.resize(WIDTH, HEIGHT)
    answers = []

    def answer(loaded, result=None):
        answers.append({"loaded": loaded, "result": result})
        application.quit()

    def ask(loaded):
        page.runJavaScript(script, lambda result: answer(loaded, result))

    page.loadFinished.connect(ask)
    QTimer.singleShot(SECONDS * 1000, application.quit)
    view.load(QUrl.fromLocalFile(os.path.abspath(path)))
    view.show()
    application.exec()
    if not answers:
        sys.exit(f"no answer from the page after {SECONDS} s")
    print(json.dumps({**answers[0], "console": page.console, "requests": requests.addresses}), flush=True)
    os._exit(0)  # Qt tears pages and profiles down in an order that warns


if __name__ == "__main__":
    main(*sys.argv[1:])
