import { problem, refuseOtherMethods } from "../_shared/http.ts";

/** Takes webhooks at /webhook-inbox/<source>. No source is declared yet, so every one is unknown. */
Deno.serve(async (request) => {
  await request.body?.cancel();
  const source = new URL(request.url).pathname.split("/").at(2) ?? "";
  return refuseOtherMethods(request, "POST") ??
    problem(404, "Not found", `There is no webhook source ${JSON.stringify(source.slice(0, 80))}.`);
});
