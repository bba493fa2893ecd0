import assert from "node:assert/strict";
import { log } from "../../supabase/functions/_shared/log.ts";
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
  assert.equal(
    errorText(new AggregateError([new Error("one"), "two"], "all failed")),
    "AggregateError: all failed\ncaused by Error: one\ncaused by two",
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
      ["unknown_kind: mine", 'thrown string: "unknown_kind: mine"'],
      ["lease expired: not so", 'thrown string: "lease expired: not so"'],
      ["", ""],
      [null, "thrown object: null"],
      [undefined, "thrown undefined: undefined"],
      [42, "thrown number: 42"],
      [{ code: 7 }, 'thrown object: {"code":7}'],
      [Math.max, "thrown function: function max() { [native code] }"],
      [Symbol("s"), "thrown symbol: Symbol(s)"],
      [1n, "thrown bigint: 1"],
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

Deno.test("a line of the log has 10,000 characters at most, and is JSON", () => {
  const lines: string[] = [];
  const { error } = console;
  console.error = (line: string) => lines.push(line);
  try {
    for (const text of ["short", "x".repeat(20_000), '{"a":"b"}'.repeat(2_000), "\u0001".repeat(20_000)]) {
      log("error", "tried", { id: "1", ids: Array(1_000).fill(crypto.randomUUID()), error: text });
    }
  } finally {
    console.error = error;
  }
  for (const line of lines) {
    assert(line.length <= 10_000, `${line.length}`);
    assert.deepEqual({ ...JSON.parse(line), ids: [], error: "" }, {
      level: "error",
      event: "tried",
      id: "1",
      ids: [],
      error: "",
    });
  }
  assert.equal(lines.length, 4);
});
