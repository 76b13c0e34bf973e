//! Reader of the part of YAML that headers of skills use: block mappings and lists, flow collections,
//! plain, quoted and block scalars, comments.
//!
//! Anchors, tags, several documents and other parts of YAML are errors. As in the clients that write
//! these files, a plain scalar may contain `: `.

/// Deepest nesting; more is an error, because the reader is recursive.
const MAX_DEPTH: usize = 16;

/// A value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Yaml {
    Scalar {
        text: String,
        /// Without quotes, so that it may be a boolean or nothing.
        plain: bool,
    },
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl Yaml {
    /// Reads a text; `None` if it is invalid, or uses what is not supported.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let lines = text.lines().map(str::to_owned).collect();
        let mut reader = YamlReader { lines, at: 0 };
        let value = reader.node(0, 0)?;
        reader.next_line()?.is_none().then_some(value)
    }

    /// The value of a key; `None` if it is missing, or this is no mapping.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(pairs) => Some(&pairs.iter().find(|(name, _)| name == key)?.1),
            _ => None,
        }
    }

    /// Whether this is no value.
    pub(crate) fn is_null(&self) -> bool {
        matches!(self, Self::Scalar { text, plain: true } if ["", "~", "null"].contains(&text.as_str()))
    }

    /// The text of a scalar; numbers and booleans are texts as well.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Scalar { text, .. } if !self.is_null() => Some(text),
            _ => None,
        }
    }

    /// The value of a boolean.
    pub(crate) fn boolean(&self) -> Option<bool> {
        match self {
            Self::Scalar { text, plain: true } => text.parse().ok(),
            _ => None,
        }
    }
}

struct YamlReader {
    lines: Vec<String>,
    at: usize,
}

impl YamlReader {
    /// Indentation and content of the next line that is not empty; `Some(None)` at the end.
    fn next_line(&mut self) -> Option<Option<(usize, String)>> {
        while let Some(line) = self.lines.get(self.at) {
            let content = without_comment(line).trim_end();
            let indent = content.len() - content.trim_start_matches(' ').len();
            let content = &content[indent..];
            if content.starts_with('\t') {
                return None;
            }
            if !content.is_empty() {
                return Some(Some((indent, content.to_owned())));
            }
            self.at += 1;
        }
        Some(None)
    }

    /// Reads the value that begins at the next line, which is indented by at least `least`.
    fn node(&mut self, least: usize, depth: usize) -> Option<Yaml> {
        let Some((indent, content)) = self.next_line()?.filter(|(indent, _)| *indent >= least)
        else {
            return Some(plain(String::new()));
        };
        if depth > MAX_DEPTH {
            return None;
        }
        if is_item(&content) {
            return self.list(indent, depth);
        }
        if key_of(&content).is_some() {
            return self.map(indent, depth);
        }
        self.at += 1;
        self.inline(content, least, depth)
    }

    fn list(&mut self, indent: usize, depth: usize) -> Option<Yaml> {
        let mut items = Vec::new();
        while let Some((at, content)) = self.next_line()? {
            if at != indent || !is_item(&content) {
                break;
            }
            // The item is what follows the dash, at its own indentation.
            let rest = &content[1..];
            if rest.is_empty() {
                self.at += 1;
            } else {
                self.lines[self.at] = format!("{}{rest}", " ".repeat(indent + 1));
            }
            items.push(self.node(indent + 1, depth + 1)?);
        }
        Some(Yaml::List(items))
    }

    fn map(&mut self, indent: usize, depth: usize) -> Option<Yaml> {
        let mut pairs: Vec<(String, Yaml)> = Vec::new();
        while let Some((at, content)) = self.next_line()? {
            if at < indent || (at == indent && is_item(&content)) {
                break;
            }
            if at > indent {
                return None;
            }
            let (key, rest) = key_of(&content)?;
            if pairs.iter().any(|(name, _)| *name == key) {
                return None;
            }
            self.at += 1;
            let value = if !rest.is_empty() {
                self.inline(rest.to_owned(), indent + 1, depth + 1)?
            } else if let Some((at, next)) = self.next_line()?
                && at == indent
                && is_item(&next)
            {
                // A list may be as little indented as its key.
                self.list(indent, depth + 1)?
            } else {
                self.node(indent + 1, depth + 1)?
            };
            pairs.push((key, value));
        }
        Some(Yaml::Map(pairs))
    }

    /// Reads a scalar or a flow collection that begins with `first`, and goes on in lines that are
    /// indented by at least `least`.
    fn inline(&mut self, first: String, least: usize, depth: usize) -> Option<Yaml> {
        if first.starts_with(['|', '>']) {
            return self.block(&first, least);
        }
        let mut text = first;
        let is_plain = !text.starts_with(['[', '{', '"', '\'']);
        while let Some((indent, content)) = self.next_line()? {
            if indent < least || (least == 0 && key_of(&content).is_some()) {
                break;
            }
            // A mapping cannot begin inside of a scalar.
            if is_plain && key_of(&content).is_some() {
                return None;
            }
            self.at += 1;
            text.push(' ');
            text.push_str(&content);
        }
        let mut flow = FlowReader { rest: &text };
        match text.chars().next()? {
            '[' | '{' | '"' | '\'' => {
                let value = flow.value(depth)?;
                flow.rest.trim().is_empty().then_some(value)
            }
            '&' | '*' | '!' | '%' | '@' | '`' => None,
            _ => Some(plain(text)),
        }
    }

    /// Reads a literal (`|`) or folded (`>`) text.
    fn block(&mut self, header: &str, least: usize) -> Option<Yaml> {
        let folded = header.starts_with('>');
        let keeps_end = match &header[1..] {
            "" => "\n",
            "-" => "",
            "+" => "\n",
            _ => return None,
        };
        let mut lines: Vec<String> = Vec::new();
        let mut indent = None;
        while let Some(line) = self.lines.get(self.at) {
            let own = line.len() - line.trim_start_matches(' ').len();
            if line.trim().is_empty() {
                lines.push(String::new());
            } else if own < indent.unwrap_or(least) {
                break;
            } else {
                let indent = *indent.get_or_insert(own);
                lines.push(line[indent..].to_owned());
            }
            self.at += 1;
        }
        while lines.last().is_some_and(String::is_empty) {
            lines.pop();
        }
        let mut text = String::new();
        for (number, line) in lines.iter().enumerate() {
            if number > 0 && !(folded && line.is_empty()) {
                let joins = folded && !lines[number - 1].is_empty();
                text.push(if joins { ' ' } else { '\n' });
            }
            text.push_str(line);
        }
        if !text.is_empty() {
            text.push_str(keeps_end);
        }
        Some(Yaml::Scalar { text, plain: false })
    }
}

/// Reader of a flow collection or a quoted scalar.
struct FlowReader<'a> {
    rest: &'a str,
}

impl FlowReader<'_> {
    fn value(&mut self, depth: usize) -> Option<Yaml> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '[' => {
                let mut items = Vec::new();
                self.rest = &self.rest[1..];
                while !self.closes(']')? {
                    items.push(self.value(depth + 1)?);
                    self.separates(']')?;
                }
                Some(Yaml::List(items))
            }
            '{' => {
                let mut pairs = Vec::new();
                self.rest = &self.rest[1..];
                while !self.closes('}')? {
                    let key = self.value(depth + 1)?.text()?.to_owned();
                    self.rest = self.rest.trim_start().strip_prefix(':')?;
                    pairs.push((key, self.value(depth + 1)?));
                    self.separates('}')?;
                }
                Some(Yaml::Map(pairs))
            }
            '"' => self.double_quoted(),
            '\'' => self.single_quoted(),
            _ => {
                let end = self.rest.find([',', ']', '}', ':']);
                let end = end.unwrap_or(self.rest.len());
                let text = self.rest[..end].trim().to_owned();
                self.rest = &self.rest[end..];
                (!text.is_empty()).then(|| plain(text))
            }
        }
    }

    /// Whether the collection ends here; `None` if the text does.
    fn closes(&mut self, with: char) -> Option<bool> {
        self.rest = self.rest.trim_start();
        if let Some(rest) = self.rest.strip_prefix(with) {
            self.rest = rest;
            return Some(true);
        }
        (!self.rest.is_empty()).then_some(false)
    }

    /// Reads the comma between two items; `None` if there is neither one nor the end.
    fn separates(&mut self, end: char) -> Option<()> {
        self.rest = self.rest.trim_start();
        if let Some(rest) = self.rest.strip_prefix(',') {
            self.rest = rest;
            return Some(());
        }
        self.rest.starts_with(end).then_some(())
    }

    fn single_quoted(&mut self) -> Option<Yaml> {
        let mut text = String::new();
        self.rest = &self.rest[1..];
        loop {
            let end = self.rest.find('\'')?;
            text.push_str(&self.rest[..end]);
            self.rest = &self.rest[end + 1..];
            match self.rest.strip_prefix('\'') {
                Some(rest) => {
                    text.push('\'');
                    self.rest = rest;
                }
                None => return Some(Yaml::Scalar { text, plain: false }),
            }
        }
    }

    fn double_quoted(&mut self) -> Option<Yaml> {
        let mut text = String::new();
        let mut chars = self.rest[1..].char_indices();
        while let Some((at, next)) = chars.next() {
            match next {
                '"' => {
                    self.rest = &self.rest[at + 2..];
                    return Some(Yaml::Scalar { text, plain: false });
                }
                '\\' => text.push(match chars.next()?.1 {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    '0' => '\0',
                    same @ ('"' | '\\' | '/' | ' ') => same,
                    kind @ ('x' | 'u' | 'U') => {
                        let digits = match kind {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let mut code = 0;
                        for _ in 0..digits {
                            code = code * 16 + chars.next()?.1.to_digit(16)?;
                        }
                        char::from_u32(code)?
                    }
                    _ => return None,
                }),
                next => text.push(next),
            }
        }
        None
    }
}

fn plain(text: String) -> Yaml {
    Yaml::Scalar { text, plain: true }
}

fn is_item(content: &str) -> bool {
    content == "-" || content.starts_with("- ")
}

/// The key at the beginning of a line, and what follows its colon.
fn key_of(content: &str) -> Option<(String, &str)> {
    if content.starts_with(['"', '\'']) {
        let mut flow = FlowReader { rest: content };
        let key = flow.value(0)?.text()?.to_owned();
        let rest = flow.rest.trim_start().strip_prefix(':')?;
        return (rest.is_empty() || rest.starts_with(' ')).then_some((key, rest.trim_start()));
    }
    if content.starts_with(['[', '{', '|', '>', '&', '*', '!', '%', '@', '`', '?']) {
        return None;
    }
    let end = match content.find(": ") {
        Some(end) => end,
        None => content.strip_suffix(':')?.len(),
    };
    Some((
        content[..end].trim_end().to_owned(),
        content[end + 1..].trim_start(),
    ))
}

/// A line without its comment, which begins the line or follows a blank outside of quotes.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, next) in line.char_indices() {
        match (quote, next) {
            (None, '#') if before == ' ' => return &line[..at],
            // Inside a word it is an apostrophe.
            (None, '"' | '\'') if !before.is_alphanumeric() => quote = Some(next),
            (Some(open), _) if open == next && before != '\\' => quote = None,
            _ => {}
        }
        before = next;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &str) {
        fn shown(value: &Yaml) -> String {
            match value {
                Yaml::Scalar { text, plain } => match plain {
                    true => text.clone(),
                    false => format!("{text:?}"),
                },
                Yaml::List(items) => {
                    let items: Vec<_> = items.iter().map(shown).collect();
                    format!("[{}]", items.join(", "))
                }
                Yaml::Map(pairs) => {
                    let pairs: Vec<_> = pairs
                        .iter()
                        .map(|(key, value)| format!("{key}: {}", shown(value)))
                        .collect();
                    format!("{{{}}}", pairs.join(", "))
                }
            }
        }
        let value = Yaml::parse(text);
        let found = value.as_ref().map_or("invalid".to_owned(), shown);
        assert_eq!(found, expected, "{text}");
    }

    #[test]
    fn yaml_of_headers_is_read() {
        check("", "");
        check(
            "name: a\ndescription: with: colon # no\n",
            "{name: a, description: with: colon}",
        );
        check(
            "a: 'it''s'\nb: \"q\\u0041\\n\"\n",
            "{a: \"it's\", b: \"qA\\n\"}",
        );
        check("a: one\n  two\n\n  three\nb: c", "{a: one two three, b: c}");
        check(
            "a: >\n  one\n  two\n\n  three\nb: 1",
            "{a: \"one two\\nthree\\n\", b: 1}",
        );
        check("a: |-\n  one\n   two\n", "{a: \"one\\n two\"}");
        check(
            "t:\n  - type: mcp\n    value: x\n  - type: mcp\nu:\n- 1\n- 2\n",
            "{t: [{type: mcp, value: x}, {type: mcp}], u: [1, 2]}",
        );
        check(
            "a: [x, \"y, z\", {b: c}]\nd: {}\ne: []",
            "{a: [x, \"y, z\", {b: c}], d: {}, e: []}",
        );
        check(
            "a:\n  b:\n    c: 1\n  d: 2\ne:\nf: don't # x",
            "{a: {b: {c: 1}, d: 2}, e: , f: don't}",
        );
        check("-\n  a: 1\n- - b\n  - c\n", "[{a: 1}, [b, c]]");
    }

    #[test]
    fn invalid_yaml_is_refused() {
        for text in [
            "name: [unclosed",
            "policy: [\n",
            "a: 1\na: 2",
            "a: 1\n   b: 2\n  c: 3",
            "a: &anchor x",
            "a: !tag x",
            "\ta: 1",
            "a: \"open",
            "a: \"x\" y",
            "a: {b}",
        ] {
            check(text, "invalid");
        }
        assert_eq!(Yaml::parse(&"- ".repeat(5000)), None);
        assert_eq!(Yaml::parse(&format!("a: {}", "[".repeat(100_000))), None);
    }
}
