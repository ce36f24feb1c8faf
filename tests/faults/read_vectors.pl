#!/usr/bin/perl
# Reads published vectors with nothing but a socket: what a service in another language sees.
# perl read_vectors.pl PORT USER ITEM...   prints {dim, user: [bits...], items: [[bits...]...], scores: [...]}
use strict;
use warnings;
use IO::Socket::INET;

my ($port, $user, @items) = @ARGV;
my $redis = IO::Socket::INET->new(PeerAddr => "127.0.0.1", PeerPort => $port) or die "no connection: $!";
binmode $redis;

sub ask {
    print $redis "*" . @_ . "\r\n" . join "", map { "\$" . length($_) . "\r\n$_\r\n" } @_;
    return reply();
}

sub reply {
    my $line = do { local $/ = "\r\n"; <$redis> };
    $line =~ s/\r\n$//;
    my ($kind, $text) = (substr($line, 0, 1), substr($line, 1));
    die "$text\n" if $kind eq "-";
    if ($kind eq "\$") {
        return undef if $text == -1;
        read($redis, my $bytes, $text + 2) == $text + 2 or die "cut short";
        return substr $bytes, 0, $text;
    }
    return [map { reply() } 1 .. $text] if $kind eq "*";
    return $text;
}

my ($dim, $dtype, $metric) = @{ ask("HMGET", "rec:meta", "dim", "dtype", "metric") };

sub floats {
    my ($bytes) = @_;
    die length($bytes) . " bytes, not " . 4 * $dim unless length $bytes == 4 * $dim;
    return unpack "f<*", $bytes;
}

sub list { return "[" . join(",", @_) . "]" }
sub bits { return list(map { unpack "L>", pack "f>", $_ } @_) }

my @vector = floats(ask("HGET", "rec:user:$user", "vector"));
my (@others, @scores);
for my $item (@items) {
    my @other = floats(ask("HGET", "rec:item:$item", "vector"));
    my $score = 0;
    $score += $vector[$_] * $other[$_] for 0 .. $dim - 1;
    push @others, bits(@other);
    push @scores, sprintf "%.17g", $score;
}
print qq({"dim": $dim, "dtype": "$dtype", "metric": "$metric", "user": ), bits(@vector),
    qq(, "items": ), list(@others), qq(, "scores": ), list(@scores), "}\n";
