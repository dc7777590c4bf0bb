// The parts of a session that all JavaScript drivers share.

export const NAMES = ["read", "search", "run"];

const turns = Number(process.env.SOAK_TURNS);

/** Return a tool's result, 1 to 4 KB. */
export function found(name, target) {
  const lines = 25 + ((target.length * 37 + name.length * 11 + Number(target.replace(/\D/g, ""))) % 75);
  return Array.from({ length: lines }, (_, n) => `${target}:${n} value of ${name} = ${(n * 7919) % 10007}`).join("\n");
}

/** Run the turns of a session. Each returns the answer's text. Report every turn as a line of JSON. */
export async function drive(turn) {
  let errors = 0;
  for (let part = 1; part <= turns && errors < 3; part += 1) {
    let error = null;
    try {
      const text = await turn(`Part ${part} please; the ticket is PART-${1000 + part}.`, part);
      if (!text.includes(`Done with part ${part}:`)) error = `wrong answer: ${text.slice(0, 200)}`;
    } catch (thrown) {
      console.error(thrown);
      error = `${thrown.name}: ${thrown.message}`.slice(0, 500);
    }
    errors += error ? 1 : 0;
    console.log(JSON.stringify({ turn: part, error }));
  }
  process.exit(errors ? 1 : 0);
}
