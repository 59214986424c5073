//! The running configuration is changed verb by verb, and each change is a generation to go back to.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddrV4, TcpStream},
    process::Command,
    time::Duration,
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    operator::{self, Ended},
    process::balancer_binary,
    status::{self, each},
    topology::{VIP, backend_address},
};
use balancer_user::api::{BackendState, Status};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(10);

struct Scene {
    // The balancer goes before its namespace.
    balancer: Balancer,
    _echoes: Vec<Echo>,
    bench: Topology,
}

impl Scene {
    fn new(backends: u8, service: Service) -> Scene {
        let bench = Plan::backends(backends).build().unwrap();
        let echo = |(number, netns)| {
            Echo::tcp(netns, SocketAddrV4::new(backend_address(number), BACKEND_PORT)).unwrap()
        };
        let echoes = (1..).zip(&bench.backends).map(echo).collect();
        let text = config::text("# how it runs", &[service]).replace("weight = 1", "weight = 1 # ours");
        let balancer = Balancer::start(&bench.balancer, &text).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene { balancer, _echoes: echoes, bench }
    }

    fn connect(&self, port: u16) -> std::io::Result<TcpStream> {
        let address = SocketAddrV4::new(VIP, port).into();
        let stream = self.bench.client.run(|| Ok(TcpStream::connect_timeout(&address, LIMIT))).unwrap()?;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Ok(stream)
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        status::wait(&self.balancer, what, wanted).unwrap()
    }

    /// A call as an operator makes it, however it ends.
    fn call(&self, words: &str) -> Ended {
        let mut command = Command::new(balancer_binary().unwrap());
        command.args(words.split(' ')).arg("--socket").arg(self.balancer.place().socket());
        operator::run(&mut command).unwrap()
    }

    fn said(&self, words: &str) -> String {
        let Ended { code, text } = self.call(words);
        assert_eq!(code, 0, "{text}");
        text
    }

    fn file(&self) -> String {
        fs::read_to_string(self.balancer.place().config()).unwrap()
    }

    fn plan(&self) -> String {
        self.said(&format!("plan -c {}", self.balancer.place().config().display()))
    }
}

#[track_caller]
fn exchange(stream: &mut TcpStream) {
    stream.write_all(b"echo").unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
}

fn actives(status: &Status) -> Vec<u64> {
    each(status, |backend| backend.active)
}

#[test]
fn backends_and_services_come_change_and_go_while_flows_go_on() {
    let service = Service { more: "drain-timeout = \"4s\"", ..Service::new("tcp", "round-robin", &[1, 1]) };
    let scene = Scene::new(3, service);
    let file = scene.file();
    let mut streams: Vec<TcpStream> = (0..2).map(|_| scene.connect(VIP_PORT).unwrap()).collect();
    streams.iter_mut().for_each(exchange);
    scene.wait("two connections", |status| actives(status) == [1, 1]);

    let third = format!("address={}:{BACKEND_PORT}", backend_address(3));
    let added = format!("backend add b3 --service tcp {third} weight=2");
    assert_eq!(scene.said(&format!("{added} --dry-run")), "+ backend b3 of tcp\n");
    assert_eq!(
        each(&status::read_fresh(&scene.balancer).unwrap(), |backend| backend.name.clone()),
        ["b1", "b2"]
    );
    assert_eq!(scene.said(&added), "+ backend b3 of tcp\ngeneration 2 is in force\n");
    scene.wait("the third's flows", |status| {
        actives(status).len() == 3 && status.services[0].backends[2].share > 0.0
    });
    let mut more: Vec<TcpStream> = (0..4).map(|_| scene.connect(VIP_PORT).unwrap()).collect();
    more.iter_mut().for_each(exchange);
    scene.wait("the third's flows", |status| actives(status) == [2, 2, 2]);

    let said = scene.said("backend set b3 weight=0 backup=true");
    assert_eq!(
        said,
        "~ backend b3 of tcp: weight 2 → 0\n~ backend b3 of tcp: backup false → true\ngeneration 3 is in force\n"
    );
    scene.wait("its weight", |status| each(status, |backend| backend.weight) == [1, 1, 0]);
    assert_eq!(scene.said("backend set b3 weight=0"), "no change\ngeneration 3 is in force\n");

    // All faults at once, and nothing has changed.
    let wrong = scene.call("backend set b3 weight=101 address=10.0.2.13 colour=red");
    assert_eq!(wrong.code, 2);
    for part in ["the running configuration:", "`weight` is 101", "without a port", "unknown key `colour`"] {
        assert!(wrong.text.contains(part), "{}", wrong.text);
    }
    for (words, part) in [
        ("backend set b4 weight=1", "there is no backend \"b4\"; there are: b1, b2, b3"),
        ("backend add b3 --service tcp address=10.0.2.14:80", "there is a backend \"b3\" already"),
        ("service rm web", "there is no service \"web\"; there are: tcp"),
        ("rollback --to 9", "there is no earlier generation \"9\"; there are: 1, 2"),
    ] {
        let Ended { code, text } = scene.call(words);
        assert!(code == 2 && text.contains(part), "{code}: {text}");
    }
    assert_eq!(scene.said("backend set b3 weight=0"), "no change\ngeneration 3 is in force\n");
    assert_eq!(scene.file(), file, "nothing was to be saved");
    let plan = "\
generation 3 is in force (backend set b3 backup=true weight=0)
earlier ones to go back to: 1, 2
- backend b3 of tcp
";
    assert_eq!(scene.plan(), plan);

    // Another service, in two steps.
    let said = scene.said(&format!("service add other address={VIP}:81 protocol=tcp method=maglev"));
    assert_eq!(said, "+ service other\ngeneration 4 is in force\n");
    assert_eq!(scene.connect(81).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    scene.said(&format!("backend add b1 --service other address={}:{BACKEND_PORT}", backend_address(2)));
    scene.wait("the other's backend", |status| {
        status.services.len() == 2
            && status.services[1].backends.first().is_some_and(|backend| backend.share > 0.0)
    });
    exchange(&mut scene.connect(81).unwrap());
    let ambiguous = scene.call("backend rm b1");
    assert!(ambiguous.code == 2 && ambiguous.text.contains("say which with `service`"), "{}", ambiguous.text);
    assert_eq!(scene.said("service rm other"), "- service other\ngeneration 6 is in force\n");

    // A backend that is removed drains, and its connections end with the drain timeout.
    assert_eq!(scene.said("backend rm b1"), "- backend b1 of tcp\ngeneration 7 is in force\n");
    scene.wait("it to leave", |status| {
        status.services[0].backends.iter().any(|backend| backend.state == BackendState::Leaving)
    });
    exchange(&mut streams[0]);
    let ended = balancer_tests::eventually(LIMIT, "its end", || {
        let mut byte = [0];
        streams[0].write_all(b"x").and_then(|()| streams[0].read_exact(&mut byte)).err()
    });
    assert_eq!(ended.unwrap().kind(), ErrorKind::ConnectionReset);
    exchange(&mut streams[1]);

    // The file is in force again after a reload, and so is what it says.
    scene.balancer.hang_up().unwrap();
    balancer_tests::eventually(LIMIT, "the reload", || scene.plan().contains("(reload of ").then_some(()))
        .unwrap();
    assert!(scene.plan().ends_with("a reload would change nothing\n"), "{}", scene.plan());
    exchange(&mut streams[1]);
}

#[test]
fn what_is_saved_is_in_the_file_and_what_is_rolled_back_is_as_before() {
    let scene = Scene::new(2, Service::new("tcp", "round-robin", &[1, 1]));
    let file = scene.file();
    assert!(file.contains("# how it runs"));
    let path = scene.balancer.place().config();
    let saved = format!(", saved to {}\n", path.display());
    let said = scene.said("backend set b2 weight=5 --save");
    assert_eq!(said, format!("~ backend b2 of tcp: weight 1 → 5\ngeneration 2 is in force{saved}"));
    let second = file.rfind("weight = 1 # ours").unwrap();
    let expected =
        [&file[..second], "weight = 5 # ours", &file[second + "weight = 1 # ours".len()..]].concat();
    assert_eq!(scene.file(), expected);
    // What is not saved stays out of the file when something else is saved.
    scene.said("backend set b1 weight=7");
    scene.said("service set tcp slow-start=3s --save");
    let new = scene.file();
    assert_eq!(new.replacen("slow-start = \"3s\"\n", "", 1), expected);
    assert!(new.find("slow-start").unwrap() < new.find("[[service.backend]]").unwrap(), "{new}");
    let plan: Value =
        serde_json::from_str(&scene.said(&format!("plan -c {} --json", path.display()))).unwrap();
    assert_eq!(plan["generation"], 4);
    assert_eq!(
        plan["differences"],
        json!([{ "what": "changed", "service": "tcp", "backend": "b1", "key": "weight", "from": "7", "to": "1" }])
    );

    // Back, and back again.
    let said = scene.said("rollback");
    assert_eq!(said, "~ service tcp: slow-start 3s → 0s\ngeneration 5 is in force\n");
    assert_eq!(scene.said("rollback"), "~ service tcp: slow-start 0s → 3s\ngeneration 6 is in force\n");
    let said = scene.said("rollback --to 1 --save");
    let expected = format!(
        "~ service tcp: slow-start 3s → 0s\n~ backend b1 of tcp: weight 7 → 1\n~ backend b2 of tcp: weight 5 → 1\n\
         generation 7 is in force{saved}"
    );
    assert_eq!(said, expected);
    assert_eq!(scene.file(), file);
    scene.wait("the weights", |status| each(status, |backend| backend.weight) == [1, 1]);

    // A file that is wrong meanwhile is not made worse, and that is said.
    fs::write(&path, file.replace("round-robin", "sticky")).unwrap();
    let Ended { code, text } = scene.call("backend set b1 weight=3 --save");
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("generation 8 is in force, but not saved: ") && text.contains("`method` is \"sticky\""),
        "{text}"
    );
    assert_eq!(scene.file(), file.replace("round-robin", "sticky"));
    // And a daemon key that can't change is said before a reload is tried.
    fs::write(&path, file.replace("[daemon]\n", "[daemon]\nmax-flows = 2048\n")).unwrap();
    let plan = scene.plan();
    assert!(
        plan.contains("! `max-flows` can't change while the balancer runs: a reload would be refused\n"),
        "{plan}"
    );
}

#[test]
fn changes_that_come_at_once_are_made_one_after_the_other() {
    let scene = Scene::new(2, Service::new("tcp", "round-robin", &[1, 1]));
    // The file says the same as is in force: reloads in between take back what was changed before, as a whole.
    std::thread::scope(|scope| {
        for number in 0..8_u16 {
            let scene = &scene;
            scope.spawn(move || {
                let port = 81 + number;
                let said = scene.said(&format!(
                    "service add s{number} address={VIP}:{port} protocol=tcp method=maglev --save"
                ));
                assert!(said.starts_with(&format!("+ service s{number}\n")), "{said}");
            });
        }
    });
    let status = status::read_fresh(&scene.balancer).unwrap();
    assert_eq!(
        (status.generation, status.services.len()),
        (9, 9),
        "each was made, and none undone by another"
    );
    assert!(scene.plan().ends_with("a reload would change nothing\n") || scene.plan().contains("its place"));
    // Reloads and verbs at once: whichever comes last, the file's services are all there.
    std::thread::scope(|scope| {
        for number in 0..6_u16 {
            let scene = &scene;
            scope.spawn(move || scene.said(&format!("backend set b1 --service tcp weight={}", number + 2)));
            scope.spawn(move || scene.balancer.hang_up().unwrap());
        }
    });
    scene.balancer.hang_up().unwrap();
    scene.wait("the file's weights", |status| each(status, |backend| backend.weight) == [1, 1]);
    assert_eq!(status::read_fresh(&scene.balancer).unwrap().services.len(), 9);
}
