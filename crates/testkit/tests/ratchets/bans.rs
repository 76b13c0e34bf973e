//! Functions and numbers that only certain files of the product may use.
//!
//! `bans.txt` beside this file lists today's exceptions as rule, file and count. A count above its line fails the test, and
//! so does one below it: `RATCHETS=lower` rewrites the file, also after code was moved, unless the sum of a rule
//! has risen. Tests, `bench` and `testkit` are not read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A rule's name, the files and folders that it does not apply to, and what it finds.
struct BanRule {
    name: &'static str,
    homes: &'static [&'static str],
    bans: fn(&BannedUse) -> bool,
}

const RULES: &[BanRule] = &[
    // Error codes of the wire: named constants, and numbers that are written out.
    BanRule {
        name: "codes",
        homes: &["crates/protocol/src/codes.rs", "crates/engine/src/error.rs"],
        bans: |found| match found {
            BannedUse::Path(path) => {
                path.iter()
                    .rev()
                    .nth(1)
                    .is_some_and(|parent| parent == "codes")
                    && is_constant(path)
            }
            BannedUse::Negative(number) => (32_000..=32_768).contains(number),
            BannedUse::Method(_) => false,
        },
    },
    // The environment of the process: settings are resolved once.
    BanRule {
        name: "env",
        homes: &["crates/exec-server/src/cli/settings.rs"],
        bans: |found| match found {
            BannedUse::Path(path) => match &path.iter().map(String::as_str).collect::<Vec<_>>()[..]
            {
                ["std", "env", function] => ENVIRONMENT.contains(function),
                _ => false,
            },
            _ => false,
        },
    },
    // The file system.
    BanRule {
        name: "fs",
        homes: &["crates/executor/src/fs/", "crates/sys/src/"],
        bans: |found| match found {
            BannedUse::Path(path) => match &path.iter().map(String::as_str).collect::<Vec<_>>()[..]
            {
                ["std" | "tokio", "fs", .., function] | ["std", "os", "unix", "fs", function] => {
                    // Types in signatures are not counted, nor is the conversion of an open descriptor.
                    function.starts_with(|first: char| first.is_lowercase()) && *function != "from"
                }
                ["std", "path", _, function] => PATH_METHODS.contains(function),
                _ => false,
            },
            BannedUse::Method(name) => PATH_METHODS.contains(&name.as_str()),
            BannedUse::Negative(_) => false,
        },
    },
];

/// Functions of `std::env` that read or change the state of the process.
const ENVIRONMENT: &[&str] = &[
    "args",
    "args_os",
    "current_dir",
    "current_exe",
    "home_dir",
    "remove_var",
    "set_current_dir",
    "set_var",
    "temp_dir",
    "var",
    "var_os",
    "vars",
    "vars_os",
];

/// Methods of `Path` that ask the file system, where other types seldom have one of that name without arguments.
const PATH_METHODS: &[&str] = &[
    "canonicalize",
    "exists",
    "read_dir",
    "read_link",
    "symlink_metadata",
    "try_exists",
];

/// Something that a rule may ban.
pub(crate) enum BannedUse {
    /// A path as if no name had been imported.
    Path(Vec<String>),
    /// A call of a method without arguments.
    Method(String),
    /// An integer behind a minus sign.
    Negative(u64),
}

/// Lines in which a file breaks a rule, by rule and file.
type FoundUses = BTreeMap<(String, String), Vec<usize>>;
/// How often it may, by rule and file.
type AllowedUses = BTreeMap<(String, String), usize>;

#[test]
fn files_use_banned_functions_no_more_often_than_the_table_allows() {
    let found = scan_product();
    for rule in RULES {
        assert!(
            found.keys().any(|(name, _)| name == rule.name),
            "{} finds nothing",
            rule.name
        );
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ratchets/bans.txt");
    let text = fs::read_to_string(&path).expect("bans.txt");
    let table = parse(&text, "bans.txt");
    if std::env::var("RATCHETS").is_ok_and(|value| value == "lower") {
        fs::write(&path, lower(&text, &found, &table).expect("lower sums")).expect("bans.txt");
        return;
    }
    let wrong = compare(&found, &table);
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn scanner_resolves_imports_and_skips_comments_strings_and_tests() {
    let source = r##"
        //! std::fs::read in a comment
        use std::{env as surroundings, fs::{self, File}, path::Path};
        use exec_server_protocol::codes::{self, INTERNAL};
        #[cfg(not(test))]
        fn product(path: &Path) -> std::fs::Metadata {
            println!("std::fs::read {:?}", surroundings::var("HOME"));
            vec![fs::read(path), File::open(path)];
            path.exists() && path.exists(1) && Path::exists(path) && other::fs::read(path) && surroundings::consts::OS && File::from(fd);
            (codes::NOT_FOUND, INTERNAL, -32_601, 32601, -1, r#"fs::read"#)
        }
        #[cfg(test)]
        #[allow(unused)]
        mod tests {
            fn test() { std::fs::read("x"); }
        }
        #[cfg(all(test, unix))]
        use std::fs::write;
        fn after() { tokio::fs::write("x").await; }
    "##;
    let mut found = FoundUses::new();
    scan(source, "x.rs", &mut found);
    let lines = |rule: &str| found[&(rule.to_owned(), "x.rs".to_owned())].clone();
    assert_eq!(lines("env"), [7]);
    assert_eq!(lines("fs"), [8, 8, 9, 9, 19]);
    assert_eq!(lines("codes"), [10, 10, 10]);
}

#[test]
fn comparison_reports_counts_above_and_below_the_table_and_lowering_refuses_a_higher_sum() {
    let key = |file: &str| ("fs".to_owned(), file.to_owned());
    let found = FoundUses::from([(key("a.rs"), vec![1, 2]), (key("b.rs"), vec![7])]);
    let text = "# kept\nfs a.rs 2\nfs b.rs 1\n";
    assert_eq!(
        compare(&found, &parse(text, "bans.txt")),
        Vec::<String>::new()
    );
    assert_eq!(
        lower(text, &found, &parse(text, "bans.txt")).as_deref(),
        Ok(text)
    );
    let stale = "fs a.rs 1\nfs b.rs 2\nfs c.rs 4\n";
    assert_eq!(
        compare(&found, &parse(stale, "bans.txt")),
        [
            "fs: a.rs has 2, more than the 1 of bans.txt: lines 1, 2",
            "fs: b.rs has 1, fewer than the 2 of bans.txt: run the tests with RATCHETS=lower",
            "fs: c.rs has 0, fewer than the 4 of bans.txt: run the tests with RATCHETS=lower",
        ]
    );
    // Code has moved from c.rs to a.rs.
    assert_eq!(
        lower(stale, &found, &parse(stale, "bans.txt")).as_deref(),
        Ok("fs a.rs 2\nfs b.rs 1\n")
    );
    let less = "fs a.rs 2\n";
    assert_eq!(
        lower(less, &found, &parse(less, "bans.txt")),
        Err("fs: 3 uses instead of 2".to_owned())
    );
}

/// Differences between the uses that were found and the table, one text each.
fn compare(found: &FoundUses, table: &AllowedUses) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((rule, file), lines) in found {
        let allowed = table
            .get(&(rule.clone(), file.clone()))
            .copied()
            .unwrap_or(0);
        if lines.len() > allowed {
            let count = lines.len();
            let lines: Vec<String> = lines.iter().map(usize::to_string).collect();
            let lines = lines.join(", ");
            wrong.push(format!(
                "{rule}: {file} has {count}, more than the {allowed} of bans.txt: lines {lines}"
            ));
        }
    }
    for ((rule, file), allowed) in table {
        let count = found.get(&(rule.clone(), file.clone())).map_or(0, Vec::len);
        if count < *allowed {
            wrong.push(format!(
                "{rule}: {file} has {count}, fewer than the {allowed} of bans.txt: run the tests with RATCHETS=lower"
            ));
        }
    }
    wrong
}

pub(crate) fn parse(text: &str, file: &str) -> AllowedUses {
    let mut table = AllowedUses::new();
    for line in text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
    {
        let [rule, file, count] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{file}: `{line}` is not a rule, a file and a count");
        };
        let count = count
            .parse()
            .unwrap_or_else(|_| panic!("{file}: `{line}` has no count"));
        let before = table.insert((rule.to_owned(), file.to_owned()), count);
        assert!(before.is_none(), "{file}: two lines of {rule} and {file}");
    }
    table
}

/// The table with today's counts, unless the sum of a rule has risen.
fn lower(text: &str, found: &FoundUses, table: &AllowedUses) -> Result<String, String> {
    for rule in RULES.iter().map(|rule| rule.name) {
        let now: usize = found
            .iter()
            .filter(|((name, _), _)| name == rule)
            .map(|(_, lines)| lines.len())
            .sum();
        let allowed: usize = table
            .iter()
            .filter(|((name, _), _)| name == rule)
            .map(|(_, count)| count)
            .sum();
        if now > allowed {
            return Err(format!("{rule}: {now} uses instead of {allowed}"));
        }
    }
    let comments = text
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(str::to_owned);
    let rows = found
        .iter()
        .map(|((rule, file), lines)| format!("{rule} {file} {}", lines.len()));
    Ok(comments.chain(rows).map(|line| line + "\n").collect())
}

fn scan_product() -> FoundUses {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    for package in fs::read_dir(top.join("crates")).expect("crates") {
        let package = package.expect("entry").path();
        if !package.ends_with("bench") && !package.ends_with("testkit") {
            collect_sources(&package.join("src"), &mut files);
        }
    }
    assert!(files.len() > 200, "{} files", files.len());
    let mut found = FoundUses::new();
    for file in files {
        let name = file
            .strip_prefix(&top)
            .expect("below the top")
            .to_string_lossy()
            .into_owned();
        scan(
            &fs::read_to_string(&file).expect("source"),
            &name,
            &mut found,
        );
    }
    found
}

pub(crate) fn collect_sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            collect_sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && !path.ends_with("tests.rs")
        {
            files.push(path);
        }
    }
}

/// Adds the lines of one file that break a rule.
fn scan(source: &str, name: &str, found: &mut FoundUses) {
    let tokens = TokenStream::from_str(source).unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut imports = BTreeMap::new();
    let mut uses = Vec::new();
    collect_uses(tokens, &mut imports, &mut uses);
    for (line, mut found_use) in uses {
        if let BannedUse::Path(path) = &mut found_use
            && let Some(full) = imports.get(&path[0])
        {
            path.splice(..1, full.iter().cloned());
        }
        for rule in RULES {
            if !rule.homes.iter().any(|home| name.starts_with(home)) && (rule.bans)(&found_use) {
                found
                    .entry((rule.name.to_owned(), name.to_owned()))
                    .or_default()
                    .push(line);
            }
        }
    }
}

/// Paths, method calls and negative numbers with their lines, and what imported names stand for.
pub(crate) fn collect_uses(
    tokens: TokenStream,
    imports: &mut BTreeMap<String, Vec<String>>,
    uses: &mut Vec<(usize, BannedUse)>,
) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let punct = |at: usize, expected: char| is_punct(tokens.get(at), expected);
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Punct(_) if punct(at, '#') && is_test_attribute(tokens.get(at + 1)) => {
                at = end_of_item(&tokens, at);
            }
            TokenTree::Punct(_) => {
                if let (true, Some(TokenTree::Literal(number))) =
                    (punct(at, '-'), tokens.get(at + 1))
                {
                    let digits = number.to_string().replace('_', "");
                    let digits = digits.trim_end_matches(|last: char| !last.is_ascii_digit());
                    if let Ok(number) = digits.parse() {
                        uses.push((line(&tokens[at]), BannedUse::Negative(number)));
                    }
                }
                at += 1;
            }
            TokenTree::Group(group) => {
                collect_uses(group.stream(), imports, uses);
                at += 1;
            }
            TokenTree::Ident(ident) if ident == "use" && !punct(at + 1, '<') => {
                let end = (at..tokens.len())
                    .find(|end| punct(*end, ';'))
                    .unwrap_or(tokens.len());
                collect_imports(&tokens[at + 1..end], &[], imports);
                at = end;
            }
            TokenTree::Ident(ident) => {
                let after_dot = at > 0 && punct(at - 1, '.') && !(at > 1 && punct(at - 2, '.'));
                let mut path = vec![ident.to_string()];
                let start = at;
                at += 1;
                while punct(at, ':')
                    && punct(at + 1, ':')
                    && let Some(TokenTree::Ident(next)) = tokens.get(at + 2)
                {
                    path.push(next.to_string());
                    at += 3;
                }
                if !after_dot {
                    uses.push((line(&tokens[start]), BannedUse::Path(path)));
                } else if let Some(TokenTree::Group(arguments)) = tokens.get(at)
                    && arguments.delimiter() == Delimiter::Parenthesis
                    && arguments.stream().is_empty()
                {
                    uses.push((line(&tokens[start]), BannedUse::Method(path.swap_remove(0))));
                }
            }
            TokenTree::Literal(_) => at += 1,
        }
    }
}

/// Adds the names that one `use` imports, with the paths that they stand for; `prefix` is put
/// before each path.
fn collect_imports(
    tokens: &[TokenTree],
    prefix: &[String],
    imports: &mut BTreeMap<String, Vec<String>>,
) {
    for tree in tokens.split(|token| is_punct(Some(token), ',')) {
        let mut path = prefix.to_vec();
        let mut tree = tree.iter();
        let mut name = None;
        while let Some(token) = tree.next() {
            match token {
                TokenTree::Ident(ident) if ident == "as" => {
                    name = tree.next().map(ToString::to_string)
                }
                TokenTree::Ident(ident) if ident == "self" && !path.is_empty() => {}
                TokenTree::Ident(ident) => path.push(ident.to_string()),
                TokenTree::Group(group) => {
                    let group: Vec<TokenTree> = group.stream().into_iter().collect();
                    collect_imports(&group, &path, imports);
                    path.clear();
                }
                _ => {}
            }
        }
        if let Some(last) = path.last().cloned() {
            imports.insert(name.unwrap_or(last), path);
        }
    }
}

/// Whether this is the group of an attribute that compiles the next item for tests only.
pub(crate) fn is_test_attribute(token: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = token else {
        return false;
    };
    let text = group.stream().to_string().replace(' ', "");
    text.starts_with("cfg(test")
        || text.starts_with("cfg(all(test")
        || text.starts_with("cfg(any(test")
}

/// The index behind the item whose attributes begin at `at`.
pub(crate) fn end_of_item(tokens: &[TokenTree], at: usize) -> usize {
    let is_end = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        token => is_punct(Some(token), ';'),
    };
    let length = tokens[at..].iter().position(is_end);
    length.map_or(tokens.len(), |length| at + length + 1)
}

fn is_constant(path: &[String]) -> bool {
    path.last().is_some_and(|last| {
        last.chars()
            .all(|each| each.is_ascii_uppercase() || each == '_')
    })
}

pub(crate) fn is_punct(token: Option<&TokenTree>, expected: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == expected)
}

fn line(token: &TokenTree) -> usize {
    token.span().start().line
}
