import assert from "node:assert/strict";
import {
  errorText,
  JobError,
  PermanentError,
  RetryAfterError,
} from "../../supabase/functions/_shared/errors.ts";

Deno.test("an error's text is its name, its message and its causes", () => {
  assert.equal(errorText(new TypeError("not a number")), "TypeError: not a number");
  assert.equal(errorText(new PermanentError("gone")), "PermanentError: gone");
  assert.equal(errorText(new RetryAfterError(5)), "RetryAfterError: retry after 5 s");
  assert.equal(errorText(new JobError("22023", "no", "say yes")), "JobError: no (say yes)");
  assert.equal(
    errorText(new Error("outer", { cause: new Error("middle", { cause: "inner" }) })),
    "Error: outer\ncaused by Error: middle\ncaused by inner",
  );
  const error = new Error("its own cause");
  error.cause = error;
  assert.equal(errorText(error).split("caused by").length, 4);
});

Deno.test("anything else that can be thrown has a text as well", () => {
  const circular: Record<string, unknown> = {};
  circular.self = circular;
  for (
    const [thrown, text] of [
      ["just text", "just text"],
      ["", ""],
      [null, "thrown object: null"],
      [undefined, "thrown undefined: undefined"],
      [42, "thrown number: 42"],
      [{ code: 7 }, 'thrown object: {"code":7}'],
      [Math.max, "thrown function: function max() { [native code] }"],
      [Symbol("s"), "thrown symbol: Symbol(s)"],
      [1n, "the thrown value cannot be read"],
      [circular, "the thrown value cannot be read"],
      [Object.create(null), "thrown object: {}"],
    ] as const
  ) {
    assert.equal(errorText(thrown), text);
  }
});

Deno.test("an error that throws when it is read does not make the attempt's end fail", () => {
  const thrower = () => {
    throw new Error("no entry");
  };
  const message = new Error();
  Object.defineProperty(message, "message", { get: thrower });
  const cause = new Error("has a cause");
  Object.defineProperty(cause, "cause", { get: thrower });
  const { proxy, revoke } = Proxy.revocable({}, {});
  revoke();
  for (
    const thrown of [message, cause, { toJSON: thrower }, {
      get x() {
        return thrower();
      },
    }, proxy]
  ) {
    assert.equal(errorText(thrown), "the thrown value cannot be read");
  }
  const symbolic = new Error();
  Object.defineProperty(symbolic, "message", { value: Symbol("no text") });
  assert.equal(typeof errorText(symbolic), "string");
});

Deno.test("a text that Postgres cannot hold is made one that it can", () => {
  assert.equal(errorText("a\u0000b"), "a\ufffdb");
  assert.equal(errorText(new Error("half \ud83d")), "Error: half \ufffd");
});

Deno.test("a long text is cut at 10,000 characters, and says so", () => {
  assert.equal(errorText("x".repeat(10_000)), "x".repeat(10_000));
  assert.equal(
    errorText("x".repeat(10_001)),
    `${"x".repeat(10_000)}… (cut, 10001 characters in all)`,
  );
  const split = errorText("x".repeat(9_999) + "😀 and more");
  assert(split.isWellFormed() && split.startsWith(`${"x".repeat(9_999)}\ufffd…`));
});
