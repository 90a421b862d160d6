"""The administration page in a real Chromium, over a gateway with control and a store."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from llmops.control.app import control_plugin, create_app
from llmops.gateway.settings import GatewaySettings
from llmops.store.factory import open_store
from llmops.store.usage_writes import UsageRecord
from tests.store.control_client import bearer, make_key
from tests.support.browser import axe_faults, browser_page, for_the_docs, take_picture
from tests.support.gateway_stack import app_client, serving
from tests.support.pages import Page, PageServer
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.usage_rows import insert_usage
from tests.support.waiting import GENEROUS

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = "<img src=x onerror=window.hacked=1>"
PENDING = {
    "labels": {"alertname": "Pending", "priority": "P3", "model": "tiny"},
    "annotations": {"summary": HOSTILE, "runbook_url": "javascript:window.hacked=1"},
}
FIRING = {
    "labels": {"alertname": "LlmTtftSpike", "priority": "P1"},
    "annotations": {"summary": "Slow.", "runbook_url": "https://runbooks.example/#llmttftspike"},
}
STATES = {"pending": ("2026-11-25T10:00:00Z", PENDING), "firing": ("2026-11-25T11:00:00Z", FIRING)}
ALERTS = {"alerts": [{**alert, "state": state, "activeAt": since} for state, (since, alert) in STATES.items()]}


class Deployment:
    """A gateway with control; `admin` is the secret of a key with all scopes."""

    def __init__(self, client: httpx.AsyncClient, store: str, admin: str, user: str) -> None:
        self.client, self.store, self.admin, self.user = client, store, admin, user
        self.url = str(client.base_url).rstrip("/")

    async def use(self, *rows: tuple[str, int, int, int]) -> None:
        """Record requests: model, days ago, tokens of prompt and answer together, cost in micro-dollars."""
        now = datetime.now(UTC)
        records = [
            UsageRecord(
                str(uuid4()), "g", at, now - timedelta(days=days), "r", self.user, model,
                2 * tokens // 3, tokens - 2 * tokens // 3, micros, tenant_id="ops",
            )
            for at, (model, days, tokens, micros) in enumerate(rows)
        ]  # fmt: skip
        async with await open_store(self.store) as opened, opened.write() as connection:
            await insert_usage(connection, records)


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(card, tmp_path):
    store = f"sqlite:///{tmp_path}/store.db"
    admin, _, user = await make_key(store, name="Administrator")
    page = Page(json.dumps({"status": "success", "data": ALERTS}), headers={"content-type": "application/json"})
    async with ScriptedTriton(card, lambda tensors: [Step(final=True)]) as triton:
        with PageServer(lambda _: page) as prometheus:
            own = {"usage": {"outbox": tmp_path / "usage"}, "web": {"prometheus": prometheus.url}}
            settings = GatewaySettings(replicas=[triton.address], store=store, lookups={"fresh": "0.1s"}, **own)
            async with serving(settings, plugins=[control_plugin(settings, tuple)]) as (client, _):
                yield Deployment(client, store, admin, user)


@contextlib.asynccontextmanager
async def administration(deployment: Deployment, browser, **options):
    async with browser_page(browser, **options) as page:
        await page.goto(f"{deployment.url}/admin")
        await page.get_by_label("API key").fill(deployment.admin)
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Keys").wait_for()
        yield page


async def test_keys_are_made_rotated_and_revoked_behind_a_login(deployment, browser):
    weak, _, _ = await make_key(deployment.store, scopes=("inference",))
    async with browser_page(browser) as page:
        await page.goto(f"{deployment.url}/admin")
        for key, shown in [
            ("sk-llmops-nothing", page.get_by_role("alert")),
            (weak, page.get_by_text("This key lacks the scope admin.")),
            (deployment.admin, page.get_by_role("rowheader", name="Administrator")),
        ]:
            await page.get_by_label("API key").fill(key)
            await page.keyboard.press("Enter")
            await shown.wait_for()
        (cookie,) = await page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["expires"]) == (True, "Strict", -1)
        assert await page.evaluate("Object.values(localStorage).join() + document.cookie") == ""

        await page.get_by_role("button", name="New key").click()
        fields = {"Tenant": "acme", "User, e-mail": "ann@acme.example", "Name": "Ann", "Budget, $": "5"}
        for label, text in fields.items():
            await page.get_by_label(label, exact=label == "Name").fill(text)
        await page.get_by_role("button", name="Create").click()
        secret = await page.locator(".notice code").inner_text()
        row = page.get_by_role("row", name="Ann")
        assert "$5 a month" in await row.inner_text()

        async def status(key: str) -> int:
            return (await deployment.client.get("/v1/models", headers=bearer(key))).status_code

        assert await status(secret) == 200
        page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
        await page.get_by_role("button", name="Rotate Ann").click()
        await page.locator(".notice code").filter(has_not_text=secret).wait_for()
        rotated = await page.locator(".notice code").inner_text()
        assert (await status(rotated), await status(secret)) == (200, 200)
        await page.get_by_role("button", name="Revoke Ann").click()
        await row.wait_for(state="detached")
        async with asyncio.timeout(GENEROUS):
            while await status(rotated) != 401:
                await asyncio.sleep(0.05)

        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("API key").wait_for()
        assert await page.context.cookies() == []
        assert {url.split("/")[2] for url in page.asked} == {deployment.url.split("/")[2]}


@for_the_docs
async def test_a_picture_of_usage_for_the_docs(deployment, browser):
    rows = [
        (model, day, 5500 * size, 700_000 * size * (3 + (day * (place + 5)) % 7))
        for place, (model, size) in enumerate({"llama70": 9, "smollm2": 5, "cloud/gpt-4o-mini": 3}.items())
        for day in range(28)
    ]
    await deployment.use(*rows)
    async with administration(deployment, browser, viewport={"width": 1100, "height": 520}) as page:
        await page.goto(f"{deployment.url}/admin#usage")
        await page.get_by_label("by").select_option("model")
        await page.locator("tbody tr").nth(2).wait_for()
        await take_picture(page, "admin.png")


async def test_usage_replicas_and_alerts_are_shown_and_run_nothing(deployment, browser):
    await deployment.use(*[("tiny", 0, 150, 1_500_000), ("tiny", 1, 150, 2_000_000), (HOSTILE, 1, 150, 500_000)])
    async with administration(deployment, browser) as page:
        await page.get_by_role("link", name="Usage").click()
        cells = page.locator("tbody tr").filter(has_text="tiny").locator("td")
        await cells.first.wait_for()
        assert await cells.all_inner_texts() == ["2", "200", "0", "100", "$3.5"]
        plot = page.locator(".plots svg[role=img]").first
        assert "$4 in all, at most $2.5 a day" in await plot.get_attribute("aria-label")
        assert await page.locator(".plots figure").first.locator("rect > title").count() == 3
        await page.get_by_role("link", name="Replicas").click()
        replica = page.locator("tbody tr").filter(has_text="127.0.0.1:")
        await replica.wait_for()
        assert "ready" in await replica.inner_text()
        await page.get_by_role("link", name="Alerts").click()
        rows = page.locator("tbody tr")
        await rows.first.wait_for()
        assert (await rows.first.inner_text()).split("\t")[:3] == ["LlmTtftSpike", "firing", "P1"]
        assert HOSTILE in await rows.nth(1).inner_text()
        links = await page.locator("main a").evaluate_all("all => all.map((one) => one.href)")
        assert links == ["https://runbooks.example/#llmttftspike"]
        assert await page.evaluate("window.hacked ?? null") is None
        assert [text for text in page.said if "401" not in text and "username" not in text] == []


async def test_axe_finds_no_serious_fault(deployment, browser):
    await deployment.use(("tiny", 0, 150, 1_500_000))
    async with administration(deployment, browser) as page:
        await page.get_by_role("button", name="New key").click()
        await page.get_by_label("Tenant").wait_for()
        for name in ("Keys", "Usage", "Replicas", "Alerts"):
            await page.get_by_role("link", name=name).click()
            await page.locator("tbody tr").first.wait_for()
            for scheme, width in (("light", 1200), ("dark", 390)):
                await page.emulate_media(color_scheme=scheme)
                await page.set_viewport_size({"width": width, "height": 800})
                assert await axe_faults(page) == [], name
                assert await page.evaluate("document.documentElement.scrollWidth") <= width, name


async def test_a_proxy_that_sends_the_user_s_token_needs_no_login(deployment, browser):
    async with browser_page(browser, extra_http_headers=bearer(deployment.admin)) as page:
        await page.goto(f"{deployment.url}/admin")
        await page.get_by_role("rowheader", name="Administrator").wait_for()
        assert await page.context.cookies() == []


@contextlib.asynccontextmanager
async def control_alone(store: str):
    async with app_client(create_app(GatewaySettings(store=store), tuple), "http://127.0.0.1:9001") as client:
        yield client


async def test_control_alone_has_the_page_and_the_same_checks(tmp_path):
    store = f"sqlite:///{tmp_path}/store.db"
    async with control_alone(store) as client:
        moved = await client.get("/", headers={"accept": "text/html"})
        assert (moved.status_code, moved.headers["location"]) == (307, "/admin")
        assert "script-src 'self' 'sha256-" in (await client.get("/admin")).headers["content-security-policy"]
        assert (await client.get("/assets/admin.js")).status_code == 200
        # before there is a key, a name that another site made point here reaches nothing
        for path in ("/api/usage", "/api/models", "/api/admin/keys", "/api/session"):
            answer = await client.get(path, headers={"host": "evil.example"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_host"), path
        assert (await client.get("/api/usage")).status_code == 200
        # administration needs a key on this machine, too
        assert (await client.get("/api/admin/keys")).status_code == 403
    admin, _, _ = await make_key(store, scopes=("admin",))
    async with control_alone(store) as client:
        assert (await client.post("/api/session", headers=bearer(admin))).json()["admin"] is True
        assert (await client.get("/api/admin/keys")).status_code == 200
        assert (await client.get("/api/admin/alerts")).json() == {"configured": False, "data": []}
        assert (await client.get("/api/admin/replicas")).status_code == 503
