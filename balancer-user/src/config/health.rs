use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use toml::de::DeValue;

use super::fault::Findings;
use super::section::{self, Key, Schema, Section, Value, read_value};
use super::value::{self, Refused};

/// How it is found out whether a backend serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Health {
    /// What is tried.
    pub probe: Probe,
    /// The port that is tried instead of the backend's own.
    pub port: Option<u16>,
    /// Time from one check to the next.
    pub interval: Duration,
    /// How long a check may take: not longer than `interval`.
    pub timeout: Duration,
    /// After how many good checks, one after the other, a backend that is down is up.
    pub rise: u32,
    /// After how many bad checks, one after the other, a backend that is up is down.
    pub fall: u32,
}

/// When what becomes of clients' new flows takes a backend out of the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassiveHealth {
    /// After how many new flows, one after the other, that get no answer or, over TCP, a reset in place of one.
    pub failures: u32,
    /// How long an answer may take.
    pub timeout: Duration,
    /// How long the backend is out.
    pub rest: Duration,
}

/// What is tried.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Probe {
    /// A connection, and what may be said on it.
    Tcp {
        /// What is sent first.
        send: Option<Bytes>,
        /// What the answer must begin with.
        receive: Option<Bytes>,
    },
    /// A datagram, and its answer.
    Udp {
        /// What is sent; nothing = an empty datagram.
        send: Bytes,
        /// What the answer must begin with; nothing = any answer will do.
        receive: Bytes,
    },
    /// A GET request, whose answer must come in whole.
    Http {
        /// Over TLS; the server's certificate is not judged.
        tls: bool,
        /// What is asked for.
        path: String,
        /// The name that it is asked under; `None` = the backend's address.
        host: Option<String>,
        /// Which answers are good.
        expect: Statuses,
    },
    /// An ICMP echo request.
    Ping,
    /// A program, which says it by its exit code: 0 = good.
    Exec {
        /// Its absolute path, and its arguments.
        command: Vec<String>,
    },
}

/// HTTP status codes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Statuses(Vec<RangeInclusive<u16>>);

impl Statuses {
    const ALLOWED: &str = "status codes from 100 to 599 in quotes, \"200\", \"200-299\" or \"200,301-308\"";

    /// Whether a code is one of them.
    pub fn contain(&self, code: u16) -> bool {
        self.0.iter().any(|range| range.contains(&code))
    }
}

impl FromStr for Statuses {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Statuses, Refused> {
        let code = |text: &str| text.parse::<u16>().ok().filter(|code| (100..=599).contains(code));
        let range = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            Some(code(first)?..=code(last)?).filter(|range| !range.is_empty())
        };
        let ranges: Option<Vec<_>> = text.split(',').map(|part| range(part.trim())).collect();
        ranges.map(Statuses).ok_or_else(|| Refused::needs(Statuses::ALLOWED))
    }
}

impl fmt::Display for Statuses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, last) => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// What is sent or must come back: a text, or `hex:` and the bytes as pairs of hexadecimal digits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    const MOST: usize = 1024;
    const ALLOWED: &str = "at most 1024 bytes in quotes: a text, or \"hex:\" and pairs of hexadecimal digits";
}

impl FromStr for Bytes {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Bytes, Refused> {
        let bytes = match text.strip_prefix("hex:") {
            None => Some(text.as_bytes().to_vec()),
            Some(digits)
                if digits.len() % 2 == 0 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) =>
            {
                let pairs = (0..digits.len()).step_by(2);
                pairs.map(|place| u8::from_str_radix(&digits[place..place + 2], 16).ok()).collect()
            }
            Some(_) => None,
        };
        bytes
            .filter(|bytes| bytes.len() <= Bytes::MOST)
            .map(Bytes)
            .ok_or_else(|| Refused::needs(Bytes::ALLOWED))
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Tcp,
    Udp,
    Http,
    Https,
    Ping,
    Exec,
}

const KINDS: [(&str, Kind); 6] = [
    ("tcp", Kind::Tcp),
    ("udp", Kind::Udp),
    ("http", Kind::Http),
    ("https", Kind::Https),
    ("ping", Kind::Ping),
    ("exec", Kind::Exec),
];

const KIND: Key = Key::new("kind", "kind = \"tcp\"").needed();
const INTERVAL: Key = Key::new("interval", "interval = \"5s\"");
const TIMEOUT: Key = Key::new("timeout", "timeout = \"2s\"");
const RISE: Key = Key::new("rise", "rise = 2");
const FALL: Key = Key::new("fall", "fall = 3");
const PORT: Key = Key::new("port", "port = 8080");
const SEND: Key = Key::new("send", "send = \"PING\\r\\n\"");
const RECEIVE: Key = Key::new("receive", "receive = \"+PONG\"");
const PATH: Key = Key::new("path", "path = \"/healthz\"");
const HOST: Key = Key::new("host", "host = \"www.example.com\"");
const EXPECT: Key = Key::new("expect", "expect = \"200-299\"");
const COMMAND: Key = Key::new("command", "command = [\"/usr/local/bin/check\", \"--fast\"]").needed();

const EXCHANGE: &[Key] = &[KIND, PORT, SEND, RECEIVE, INTERVAL, TIMEOUT, RISE, FALL];
const REQUEST: &[Key] = &[KIND, PORT, PATH, HOST, EXPECT, INTERVAL, TIMEOUT, RISE, FALL];

/// Each kind has keys of its own: what means nothing to it is unknown there.
const fn schema(kind: Kind) -> &'static Schema {
    const TCP: Schema = Schema { title: "health of kind \"tcp\"", keys: EXCHANGE };
    const UDP: Schema = Schema { title: "health of kind \"udp\"", keys: EXCHANGE };
    const HTTP: Schema = Schema { title: "health of kind \"http\"", keys: REQUEST };
    const HTTPS: Schema = Schema { title: "health of kind \"https\"", keys: REQUEST };
    const PING: Schema =
        Schema { title: "health of kind \"ping\"", keys: &[KIND, INTERVAL, TIMEOUT, RISE, FALL] };
    const EXEC: Schema = Schema {
        title: "health of kind \"exec\"",
        keys: &[KIND, PORT, COMMAND, INTERVAL, TIMEOUT, RISE, FALL],
    };
    match kind {
        Kind::Tcp => &TCP,
        Kind::Udp => &UDP,
        Kind::Http => &HTTP,
        Kind::Https => &HTTPS,
        Kind::Ping => &PING,
        Kind::Exec => &EXEC,
    }
}

/// Each kind, and what it may hold.
pub(super) fn schemas() -> [(&'static str, &'static Schema); 6] {
    KINDS.map(|(name, kind)| (name, schema(kind)))
}

/// For a kind that is not known: nothing of it can be judged.
const ANY: Schema = Schema {
    title: "health",
    keys: &[KIND, PORT, SEND, RECEIVE, PATH, HOST, EXPECT, COMMAND, INTERVAL, TIMEOUT, RISE, FALL],
};

pub(super) const PASSIVE_HEALTH: Schema = Schema {
    title: "passive-health",
    keys: &[
        Key::new("failures", "failures = 10"),
        Key::new("timeout", "timeout = \"3s\""),
        Key::new("rest", "rest = \"30s\""),
    ],
};

impl PassiveHealth {
    /// Longest time that an answer may be given.
    pub const LONGEST_TIMEOUT: Duration = Duration::from_secs(10);

    /// `None` only where a fault was found.
    pub(super) fn read(value: &Value<'_>, findings: &mut Findings<'_>) -> Option<PassiveHealth> {
        let section = Section::open(&PASSIVE_HEALTH, value, findings)?;
        let up_to = |most| value::duration(Duration::from_secs(1)..=most);
        let failures = section.optional("failures", 10, value::integer(1..=1000), findings);
        let timeouts = up_to(PassiveHealth::LONGEST_TIMEOUT);
        let timeout = section.optional("timeout", Duration::from_secs(3), timeouts, findings);
        let rest = section.optional("rest", Duration::from_secs(30), up_to(LONGEST), findings);
        Some(PassiveHealth { failures: failures?, timeout: timeout?, rest: rest? })
    }
}

const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(3600);
const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);
/// Unless the interval is shorter.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest path or host, in bytes.
const LONGEST_TEXT: usize = 1024;

impl Health {
    /// `None` only where a fault was found.
    pub(super) fn read(value: &Value<'_>, findings: &mut Findings<'_>) -> Option<Health> {
        let named = value.get_ref().as_table().and_then(|table| table.get("kind"));
        let kind = named.and_then(|kind| value::choice(&KINDS)(kind.get_ref()).ok());
        let section = Section::open(kind.map_or(&ANY, schema), value, findings)?;
        let kind = section.required("kind", value::choice(&KINDS), findings);

        let port = value::integer(1..=u32::from(u16::MAX));
        let port = section.optional("port", None, |value| port(value).map(Some), findings);
        let interval =
            section.optional("interval", DEFAULT_INTERVAL, value::duration(SHORTEST..=LONGEST), findings);
        let timeouts = value::duration(Duration::from_millis(10)..=LONGEST);
        let timeout = section.optional("timeout", None, |value| timeouts(value).map(Some), findings);
        if let (Some(interval), Some(Some(timeout))) = (interval, timeout)
            && timeout > interval
        {
            let [interval, timeout] = [interval, timeout].map(humantime::format_duration);
            let message = format!(
                "`timeout` is \"{timeout}\" with an `interval` of \"{interval}\"; allowed: at most that"
            );
            findings.add(section.place_of("timeout"), message);
        }
        let rise = section.optional("rise", 2, value::integer(1..=100), findings);
        let fall = section.optional("fall", 3, value::integer(1..=100), findings);
        let probe = Probe::read(kind?, &section, findings);

        let interval = interval?;
        Some(Health {
            probe: probe?,
            port: port?.and_then(|port| u16::try_from(port).ok()),
            interval,
            timeout: timeout?.unwrap_or(DEFAULT_TIMEOUT.min(interval)),
            rise: rise?,
            fall: fall?,
        })
    }
}

impl Probe {
    fn read(kind: Kind, section: &Section<'_>, findings: &mut Findings<'_>) -> Option<Probe> {
        let mut bytes = |key: &str| {
            let read = value::text(Bytes::ALLOWED, str::parse::<Bytes>);
            section.optional(key, None, |value| read(value).map(Some), findings)
        };
        match kind {
            Kind::Tcp => {
                let (send, receive) = (bytes("send"), bytes("receive"));
                Some(Probe::Tcp { send: send?, receive: receive? })
            }
            Kind::Udp => {
                let (send, receive) = (bytes("send"), bytes("receive"));
                Some(Probe::Udp { send: send?.unwrap_or_default(), receive: receive?.unwrap_or_default() })
            }
            Kind::Http | Kind::Https => {
                let path = section.optional("path", "/".to_owned(), value::text(PATHS, path), findings);
                let hosts = value::text(HOSTS, host);
                let host = section.optional("host", None, |value| hosts(value).map(Some), findings);
                let statuses = value::text(Statuses::ALLOWED, str::parse);
                let good = || Statuses(vec![200..=299]);
                let expect = section.optional("expect", good(), statuses, findings);
                let tls = matches!(kind, Kind::Https);
                Some(Probe::Http { tls, path: path?, host: host?, expect: expect? })
            }
            Kind::Ping => Some(Probe::Ping),
            Kind::Exec => read_command(section, findings).map(|command| Probe::Exec { command }),
        }
    }
}

const PATHS: &str = "a path of at most 1024 bytes in quotes, without spaces, that begins with /";
const HOSTS: &str = "a host name of at most 1024 bytes in quotes, without spaces and slashes";

fn path(text: &str) -> Result<String, Refused> {
    let fits = text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    if !fits || text.len() > LONGEST_TEXT {
        return Err(Refused::needs(PATHS));
    }
    Ok(text.to_owned())
}

fn host(text: &str) -> Result<String, Refused> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    if text.is_empty() || text.len() > LONGEST_TEXT || !text.bytes().all(fits) {
        return Err(Refused::needs(HOSTS));
    }
    Ok(text.to_owned())
}

/// A list of strings whose first is an absolute path.
fn read_command(section: &Section<'_>, findings: &mut Findings<'_>) -> Option<Vec<String>> {
    const MOST: usize = 100;
    let Some(value) = section.get("command") else {
        section.report_missing("command", findings);
        return None;
    };
    let items = section::list(value, "`command`", findings)?;
    if items.is_empty() || items.len() > MOST {
        let message = format!("`command` has {} elements; allowed: 1 to {MOST}", items.len());
        findings.add(value.span().start, message);
        return None;
    }
    let mut words = Vec::new();
    for (index, item) in items.iter().enumerate() {
        words.push(read_value("command", item, |word| command_word(word, index == 0), findings));
    }
    words.into_iter().collect()
}

fn command_word(value: &DeValue<'_>, is_program: bool) -> Result<String, Refused> {
    let word = value.as_str().filter(|word| !word.contains('\0'));
    match word {
        Some(word) if !is_program || Path::new(word).is_absolute() => Ok(word.to_owned()),
        _ if is_program => Err(Refused::needs("the absolute path of a program in quotes")),
        _ => Err(Refused::needs("an argument in quotes")),
    }
}
