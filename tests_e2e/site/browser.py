"""A Chromium without a window, which PyQt6-WebEngine brings: it opens pages, and says what happened to them."""

import json
import os

os.environ["QT_QPA_PLATFORM"] = "offscreen"
# The pages are our own, and the sandbox cannot be had by root.
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu"

from PyQt6 import sip
from PyQt6.QtCore import QEventLoop, QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

PHONE, LAPTOP = (390, 844), (1280, 800)


class Requests(QWebEngineUrlRequestInterceptor):
    """Writes down what a page asks for."""

    def __init__(self):
        super().__init__()
        self.urls = []

    def interceptRequest(self, info):
        self.urls.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    """Writes down what a page says on the console."""

    said: list

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.said.append(f"{level.name}: {message} ({source}:{line})")


class Browser:
    """One tab. What the page said and asked for since it was opened lies in `said` and `asked`."""

    def __init__(self):
        self.app = QApplication.instance() or QApplication(["chunkwise"])
        self.profile = QWebEngineProfile()
        self.requests = Requests()
        self.profile.setUrlRequestInterceptor(self.requests)
        self.view = QWebEngineView()
        self.page = Page(self.profile, self.view)
        self.view.setPage(self.page)
        self.view.show()

    @property
    def said(self) -> list[str]:
        return self.page.said

    @property
    def asked(self) -> list[str]:
        return self.requests.urls

    def open(self, url: str, size: tuple[int, int] = PHONE) -> bool:
        """Open a page in a window of that size, and return whether it came."""
        self.page.said, self.requests.urls = [], []
        self.view.resize(*size)
        self.page.load(QUrl(url))
        came = self._wait(self.page.loadFinished.connect)
        self.page.loadFinished.disconnect()
        return came

    def resize(self, size: tuple[int, int]) -> None:
        """Give the window another size, and wait for the page to have it."""
        self.view.resize(*size)
        assert self.wait_for(f"innerWidth === {size[0]}")

    def run(self, script: str):
        """Return the value of a JavaScript expression."""
        return json.loads(self._wait(lambda done: self.page.runJavaScript(f"JSON.stringify({script})", done)))

    def wait_for(self, script: str, seconds: float = 10.0):
        """Return the value of an expression as soon as it is true; what it is in the end if it never is."""
        for _ in range(int(seconds / 0.02)):
            if value := self.run(script):
                return value
            self.sleep(0.02)
        return self.run(script)

    def picture(self, path) -> None:
        """Save what the window shows, for a person to look at."""
        self.view.grab().save(str(path))

    def lightness(self) -> int:
        """Return how light the lower left corner of the window is drawn, from 0 to 255."""
        drawn = self.view.grab().toImage()
        return drawn.pixelColor(4, drawn.height() - 4).lightness()

    def close(self) -> None:
        # Qt wants a page gone before its profile.
        sip.delete(self.view)
        sip.delete(self.profile)

    def sleep(self, seconds: float) -> None:
        loop = QEventLoop()
        QTimer.singleShot(int(1000 * seconds), loop.quit)
        loop.exec()

    def _wait(self, begin, seconds: float = 60.0):
        """Return what the function is called with that `begin` gets."""
        loop, values, timer = QEventLoop(), [], QTimer(singleShot=True)

        def done(value):
            values.append(value)
            loop.quit()

        timer.timeout.connect(loop.quit)
        timer.start(int(1000 * seconds))
        begin(done)
        if not values:
            loop.exec()
        if not values:
            raise TimeoutError(f"The browser must answer within {seconds} s.")
        return values[0]
