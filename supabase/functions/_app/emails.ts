/** The mails that this app sends. Each has a subject and paragraphs, from which both the text and the HTML are made. */
const templates = {
  welcome: {
    subject: "Welcome, {name}",
    paragraphs: ["Hello {name},", "your account is ready. Reply to this mail if anything is unclear."],
  },
  password_changed: {
    subject: "Your password was changed",
    paragraphs: [
      "Hello {name},",
      "the password of your account was changed. If that was not you, reply to this mail at once.",
    ],
  },
};

type Template = keyof typeof templates;

/** A mail's subject, text and HTML. `{name}` and the like are filled from `data` and escaped in the HTML; `name` defaults to "there". */
export function render(
  template: Template,
  data: Record<string, string>,
): { subject: string; text: string; html: string } {
  const values: Record<string, string> = { name: "there", ...data };
  const fill = (text: string, escape: (value: string) => string = (value) => value) =>
    text.replaceAll(/\{(\w+)\}/g, (placeholder, name: string) => escape(values[name] ?? placeholder));
  const { subject, paragraphs } = templates[template];
  return {
    // A line break would end the header.
    subject: fill(subject).replaceAll(/[\r\n]+/g, " "),
    text: paragraphs.map((paragraph) => fill(paragraph)).join("\n\n"),
    html: paragraphs.map((paragraph) => `<p>${fill(paragraph, escapeHtml)}</p>`).join("\n"),
  };
}

function escapeHtml(value: string): string {
  return value.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll(
    '"',
    "&quot;",
  );
}
