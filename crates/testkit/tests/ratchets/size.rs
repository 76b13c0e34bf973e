//! Length of files and functions, and import cycles between the modules of a crate.
//!
//! Counts lines that contain code: no blank lines, comments, documentation or tests. `size.txt` beside this file lists
//! today's exceptions as rule, subject and count. A count above its line fails the test, and so does one below it:
//! `RATCHETS=lower` rewrites the file, unless an exception has grown.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::str::FromStr as _;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::bans::{
    BannedUse, collect_sources, collect_uses, end_of_item, is_punct, is_test_attribute, parse,
};

/// Exclusive upper limits of code lines.
const MAX_FILE: usize = 900;
const MAX_FUNCTION: usize = 80;
/// Most modules in one import cycle.
const MAX_CYCLE: usize = 4;

/// Counts above their limit, by rule and subject.
type Excesses = BTreeMap<(String, String), usize>;

#[test]
fn files_functions_and_import_cycles_are_no_larger_than_the_table_allows() {
    let found = measure_product();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ratchets/size.txt");
    let text = fs::read_to_string(&path).expect("size.txt");
    let table = parse(&text, "size.txt");
    let wrong = compare(&found, &table);
    let grown = wrong.iter().any(|line| line.contains("more than"));
    if !grown && std::env::var("RATCHETS").is_ok_and(|value| value == "lower") {
        fs::write(&path, render(&text, &found)).expect("size.txt");
        return;
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn measure_counts_only_code_outside_tests() {
    let source = "//! Module.\n\n/// Function.\nfn first(\n    a: u8, // comment\n) {\n\n    let _ = \"one\n\n  two\";\n}\n\
                  #[cfg(test)]\nmod tests {\n    fn second() {\n    }\n}\ntrait T { fn third(); }\n";
    let measured = Measured::of(source, "x.rs");
    assert_eq!(measured.lines.len(), 7);
    assert_eq!(measured.functions, [("first".to_owned(), 6)]);
}

#[test]
fn cycle_through_a_re_export_is_found_and_parents_may_name_their_children() {
    let sources = [
        ("", "mod a; mod b; mod c;"),
        (
            "a",
            "pub use inner::Deep; mod inner; use crate::b::f; fn g() { super::c::h() }",
        ),
        ("a::inner", "pub struct Deep;"),
        ("b", "use crate::c; fn f() {}"),
        ("c", "use crate::a::Deep; fn h() {}"),
    ];
    let modules = sources.map(|(name, source)| (module_path(name), source.to_owned()));
    let sizes = |modules: &BTreeMap<ModulePath, String>| {
        let cycles = largest_cycles(modules).into_iter();
        cycles.map(|cycle| cycle.len()).collect::<Vec<_>>()
    };
    assert_eq!(sizes(&modules.clone().into()), Vec::<usize>::new());
    let mut modules = BTreeMap::from(modules);
    modules.insert(module_path("c"), "use crate::a::g;".to_owned());
    assert_eq!(sizes(&modules), [3]);
    modules.insert(module_path("a::inner"), "use crate::b::f;".to_owned());
    assert_eq!(sizes(&modules), [3]);
    modules.insert(module_path("b"), "use crate::a::Deep;".to_owned());
    assert_eq!(sizes(&modules), [2, 2]);
}

#[test]
fn comparison_reports_sizes_above_and_below_the_table() {
    let key = |subject: &str| ("file".to_owned(), subject.to_owned());
    let found = Excesses::from([(key("a.rs"), 950), (key("b.rs"), 1000)]);
    let table = BTreeMap::from([(key("a.rs"), 940), (key("b.rs"), 1001), (key("c.rs"), 999)]);
    assert_eq!(
        compare(&found, &table),
        [
            "file: a.rs has 950, more than the 940 of size.txt",
            "file: b.rs has 1000, less than the 1001 of size.txt: run the tests with RATCHETS=lower",
            "file: c.rs is within the limit: run the tests with RATCHETS=lower",
        ]
    );
    assert_eq!(compare(&found, &found), Vec::<String>::new());
    assert_eq!(
        render("# kept\nfile c.rs 1\n", &found),
        "# kept\nfile a.rs 950\nfile b.rs 1000\n"
    );
}

fn compare(found: &Excesses, table: &Excesses) -> Vec<String> {
    let subjects: BTreeSet<_> = found.keys().chain(table.keys()).collect();
    let mut wrong = Vec::new();
    for key in subjects {
        let (rule, subject) = key;
        match (found.get(key), table.get(key)) {
            (Some(size), allowed) if allowed.is_none_or(|allowed| size > allowed) => {
                let limit = match (allowed, rule.as_str()) {
                    (Some(allowed), _) => format!("the {allowed} of size.txt"),
                    (None, "file") => format!("{} lines", MAX_FILE - 1),
                    (None, "function") => format!("{} lines", MAX_FUNCTION - 1),
                    (None, _) => format!("{MAX_CYCLE} modules"),
                };
                wrong.push(format!("{rule}: {subject} has {size}, more than {limit}"));
            }
            (Some(size), Some(allowed)) if size < allowed => wrong.push(format!(
                "{rule}: {subject} has {size}, less than the {allowed} of size.txt: run the tests with RATCHETS=lower"
            )),
            (None, _) => wrong.push(format!(
                "{rule}: {subject} is within the limit: run the tests with RATCHETS=lower"
            )),
            _ => {}
        }
    }
    wrong
}

/// The table with today's counts.
fn render(text: &str, found: &Excesses) -> String {
    let comments = text.lines().filter(|line| line.starts_with('#'));
    let rows = found
        .iter()
        .map(|((rule, subject), size)| format!("{rule} {subject} {size}"));
    comments
        .map(str::to_owned)
        .chain(rows)
        .map(|line| line + "\n")
        .collect()
}

fn measure_product() -> Excesses {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Excesses::new();
    let mut files = 0;
    for package in fs::read_dir(top.join("crates")).expect("crates") {
        let package = package.expect("entry").path();
        if package.ends_with("bench") || package.ends_with("testkit") {
            continue;
        }
        let mut modules = BTreeMap::new();
        let mut sources = Vec::new();
        collect_sources(&package.join("src"), &mut sources);
        for path in sources {
            files += 1;
            let source = fs::read_to_string(&path).expect("source");
            let name = path.strip_prefix(&top).expect("below the top");
            let name = name.to_string_lossy().into_owned();
            let measured = Measured::of(&source, &name);
            if measured.lines.len() >= MAX_FILE {
                let key = ("file".to_owned(), name.clone());
                found.insert(key, measured.lines.len());
            }
            for (function, lines) in measured.functions {
                if lines >= MAX_FUNCTION {
                    let key = ("function".to_owned(), format!("{name}:{function}"));
                    let longest = found.entry(key).or_default();
                    *longest = lines.max(*longest);
                }
            }
            let module = path.strip_prefix(package.join("src")).expect("below src");
            let module = module.with_extension("");
            let module = module.to_string_lossy().replace('/', "::");
            let module = module.strip_suffix("::mod").unwrap_or(&module);
            let module = if module == "lib" || module == "main" {
                ""
            } else {
                module
            };
            let text: &mut String = modules.entry(module_path(module)).or_default();
            text.push_str(&source);
        }
        let package = package
            .file_name()
            .expect("name")
            .to_string_lossy()
            .into_owned();
        for cycle in largest_cycles(&modules) {
            if cycle.len() > MAX_CYCLE {
                let subject = format!("{package}:{}", cycle[0]);
                found.insert(("cycle".to_owned(), subject), cycle.len());
            }
        }
    }
    assert!(files > 200, "{files} files");
    found
}

/// Code lines of a file, and of each of its functions.
#[derive(Default)]
struct Measured {
    lines: BTreeSet<usize>,
    functions: Vec<(String, usize)>,
}

impl Measured {
    fn of(source: &str, name: &str) -> Self {
        let tokens =
            TokenStream::from_str(source).unwrap_or_else(|error| panic!("{name}: {error}"));
        let lines: Vec<&str> = source.lines().collect();
        let mut measured = Self::default();
        let mut spans = Vec::new();
        measured.add(tokens, &lines, &mut spans);
        measured.functions = spans
            .into_iter()
            .map(|(name, first, last)| (name, measured.lines.range(first..=last).count()))
            .collect();
        measured
    }

    /// Adds the lines of tokens, and the first and last line of the functions among them.
    fn add(
        &mut self,
        tokens: TokenStream,
        source: &[&str],
        functions: &mut Vec<(String, usize, usize)>,
    ) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            let token = &tokens[at];
            let (start, end) = (token.span().start(), token.span().end());
            if is_punct(Some(token), '#') && is_test_attribute(tokens.get(at + 1)) {
                at = end_of_item(&tokens, at);
                continue;
            }
            // A comment of documentation consists of the tokens of an attribute.
            let text: String = source[start.line - 1]
                .chars()
                .skip(start.column)
                .take(2)
                .collect();
            if text == "//" || text == "/*" {
                at += 1;
                continue;
            }
            match token {
                TokenTree::Group(group) => {
                    if group.delimiter() != Delimiter::None {
                        self.lines.extend([start.line, end.line]);
                    }
                    self.add(group.stream(), source, functions);
                }
                TokenTree::Literal(_) => self.lines.extend(
                    (start.line..=end.line).filter(|line| !source[line - 1].trim().is_empty()),
                ),
                _ => {
                    self.lines.insert(start.line);
                }
            }
            if let (TokenTree::Ident(keyword), Some(TokenTree::Ident(name))) =
                (token, tokens.get(at + 1))
                && keyword == "fn"
            {
                let body = tokens[at..].iter().find(|token| match token {
                    TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                    token => is_punct(Some(token), ';'),
                });
                if let Some(TokenTree::Group(body)) = body {
                    functions.push((name.to_string(), start.line, body.span().end().line));
                }
            }
            at += 1;
        }
    }
}

type ModulePath = Vec<String>;

fn module_path(name: &str) -> ModulePath {
    let parts = name.split("::").filter(|part| !part.is_empty());
    parts.map(str::to_owned).collect()
}

/// Modules in each import cycle of a crate, the largest cycle first. The root of the crate and the names that a
/// module takes from its own submodules do not count.
fn largest_cycles(modules: &BTreeMap<ModulePath, String>) -> Vec<Vec<String>> {
    let mut imports = BTreeMap::new();
    let mut paths = BTreeMap::new();
    for (module, source) in modules {
        let tokens = TokenStream::from_str(source).expect("tokens");
        let (mut imported, mut uses) = (BTreeMap::new(), Vec::new());
        collect_uses(tokens, &mut imported, &mut uses);
        let mut used: Vec<ModulePath> = imported.values().cloned().collect();
        used.extend(uses.into_iter().filter_map(|(_, found)| match found {
            BannedUse::Path(path) if path.len() > 1 => Some(path),
            _ => None,
        }));
        paths.insert(module, used);
        imports.insert(module.clone(), imported);
    }
    let mut edges: BTreeMap<&ModulePath, BTreeSet<ModulePath>> = BTreeMap::new();
    for (module, used) in paths {
        let targets = used
            .iter()
            .filter_map(|path| target(module, path, &imports));
        let targets = targets.filter(|to| !to.is_empty() && !to.starts_with(module));
        if !module.is_empty() {
            edges.insert(module, targets.collect());
        }
    }
    let reachable: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> = edges
        .keys()
        .map(|from| {
            let mut seen = BTreeSet::new();
            let mut open = vec![*from];
            while let Some(next) = open.pop() {
                open.extend(
                    edges
                        .get(next)
                        .into_iter()
                        .flatten()
                        .filter(|to| seen.insert(*to)),
                );
            }
            (*from, seen)
        })
        .collect();
    let cycles: BTreeSet<Vec<&ModulePath>> = reachable
        .iter()
        .filter(|(from, seen)| seen.contains(*from))
        .map(|(from, seen)| {
            let mutual = seen.iter().filter(|to| reachable[**to].contains(*from));
            mutual.copied().collect()
        })
        .collect();
    let names = |cycle: &Vec<&ModulePath>| cycle.iter().map(|module| module.join("::")).collect();
    let mut names: Vec<Vec<String>> = cycles.iter().map(names).collect();
    names.sort_by_key(|cycle| std::cmp::Reverse(cycle.len()));
    names
}

/// The module in which the last name of a path is defined, if it is one of this crate.
fn target(
    module: &ModulePath,
    path: &[String],
    imports: &BTreeMap<ModulePath, BTreeMap<String, ModulePath>>,
) -> Option<ModulePath> {
    let mut full = absolute(module, path, imports)?;
    for _ in 0..5 {
        let length = (0..=full.len())
            .rev()
            .find(|end| imports.contains_key(&full[..*end]))?;
        let found = full[..length].to_vec();
        let Some(re_export) = full.get(length).and_then(|name| imports[&found].get(name)) else {
            return Some(found);
        };
        let Some(mut next) = absolute(&found, re_export, imports) else {
            return Some(found);
        };
        next.extend_from_slice(&full[length + 1..]);
        if next == full {
            return Some(found);
        }
        full = next;
    }
    None
}

/// A path of a module from the root of its crate; `None` if it leads to another crate.
fn absolute(
    module: &ModulePath,
    path: &[String],
    imports: &BTreeMap<ModulePath, BTreeMap<String, ModulePath>>,
) -> Option<ModulePath> {
    let mut base = module.clone();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            base.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        first => {
            base.push(first.to_owned());
            if !imports.contains_key(&base) {
                return None;
            }
            rest = &path[1..];
        }
    }
    base.extend_from_slice(rest);
    Some(base)
}
