import assert from "node:assert/strict";
import { startFunction } from "../support.ts";

Deno.test("webhook-inbox knows no source yet: each is answered 404, and another method than POST 405", async () => {
  await using inbox = await startFunction("webhook-inbox", {});
  for (const path of ["/stripe", "", "/", "/stripe/more", "/%00?x=1"]) {
    const response = await inbox.fetch(path, { method: "POST", body: "{}" });
    assert.equal(response.status, 404);
    assert.equal(response.headers.get("Content-Type"), "application/problem+json");
    const { type, title, status, detail } = await response.json();
    assert.deepEqual({ type, title, status }, { type: "about:blank", title: "Not found", status: 404 });
    assert.match(detail, /no webhook source/);
  }
  const response = await inbox.fetch("/stripe");
  assert.equal(response.status, 405);
  assert.equal(response.headers.get("Allow"), "POST");
  await response.body?.cancel();
});
