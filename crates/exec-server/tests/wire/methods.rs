//! The table of methods in `docs/wire.md` matches the table in the code.

use std::fmt::Write as _;
use std::path::Path;

use exec_server_protocol::MethodId;

const HEAD: &str = "| method | scope | changes | repeatable | adds |\n|---|---|---|---|---|\n";

fn render() -> String {
    let mut text = HEAD.to_owned();
    for method in MethodId::ALL {
        let row = method.row();
        let list = |items: Vec<&str>, or: &str| match &*items {
            [] => or.to_owned(),
            items => format!("`{}`", items.join("`, `")),
        };
        let scopes = row.scopes.iter().map(|scope| scope.name()).collect();
        let adds = row.extensions.iter().map(|name| {
            // Fields of the method itself are shown without its name.
            match name.strip_prefix(row.name) {
                Some(field) if field.starts_with('#') => field,
                _ => name,
            }
        });
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} |",
            row.name,
            list(scopes, "–"),
            row.changes.name(),
            if row.repeatable { "yes" } else { "no" },
            list(adds.collect(), ""),
        );
    }
    text
}

#[test]
fn method_table_in_docs_matches_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/wire.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let start = document.find(HEAD).expect("the head of the table");
    let written = document[start..].split_inclusive('\n');
    let len: usize = written
        .take_while(|line| line.starts_with('|'))
        .map(str::len)
        .sum();
    let rendered = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let (before, after) = (&document[..start], &document[start + len..]);
        std::fs::write(&path, format!("{before}{rendered}{after}")).unwrap();
        return;
    }
    assert!(
        document[start..start + len] == rendered,
        "docs/wire.md is out of date; run this test with UPDATE_DOCS=1 to regenerate it"
    );
}
