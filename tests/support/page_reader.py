"""What an HTML page says and loads."""

from html.parser import HTMLParser


class PageReader(HTMLParser):
    """The text of each element by its tag, and what it loads; fails on a tag that is closed in the wrong order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: dict[str, list[str]] = {}
        self.loads: list[str | None] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "link"):
            self.open.append(tag)
            self.found.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.found[self.open[-1]][-1] += data
